"""Text a second of `python data.py` against `tokenizers` alone on the same text, in one process.

    python -m tests.bench preparation [--text PATH]

The reference has all texts in memory and lets `encode_batch_fast` use all cores; ours reads a JSONL
file, tokenizes in processes, and writes ids, offsets and checksum. Also with other numbers of
workers, and with the tokenizer of bytes.
"""

import json
import os
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

from steady.models.device import usable_cores
from steady.tokens.tokenizers import load_tokenizer
from tests.bench.common import Figure, compare, in_turns, seconds
from tools.prepare import Options, prepare

VOCAB = 16384


def documents(path: str | None) -> list[str]:
    """About 30 MB: paragraphs of the file, or the source files of the standard library."""
    if path:
        found = Path(path).read_text().split("\n\n")
    else:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
        found = [f.read_text(errors="ignore") for f in files if "site-packages" not in f.parts]
    found = [text for text in found if text.strip()]
    copies = round(30e6 / sum(map(len, found))) or 1
    return found * copies


def main(options) -> list[Figure]:
    texts, cores = documents(options.text), usable_cores()
    texts, rounds = (texts[:300], 1) if options.quick else (texts, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "a.jsonl"
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        size = sum(len(text.encode()) for text in texts) / 1e6

        def ours(out: str = "o", **how):
            prepare([str(source)], Options(out=str(folder / out), **how))

        ours("t", train_tokenizer=VOCAB)
        tokenizer = str(folder / "t/tokenizer")
        fast = load_tokenizer(tokenizer).backend_tokenizer

        def alone():
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
            for i in range(0, len(texts), 1000):
                fast.encode_batch_fast(texts[i : i + 1000], add_special_tokens=False)

        ways = {"alone": alone}
        for workers in sorted({1, cores, 2 * cores}):
            ways[f"data.py, {workers} workers"] = partial(ours, tokenizer=tokenizer,
                                                          workers=workers)
        ways["data.py, bytes"] = ours
        rates = in_turns({name: lambda way=way: size / seconds(way) for name, way in ways.items()},
                         rounds)
    reference = rates.pop("alone")
    return [compare(f"text to tokens, {size:.0f} MB, {name}", f"tokenizers alone, {cores} cores",
                    rate, reference, "{:.1f} MB/s", ">= 0.8" if f" {cores} w" in name else "")
            for name, rate in rates.items()]
