"""Text a second of `python data.py` against `tokenizers` alone on the same text, in one process.

    python -m tests.bench preparation [--text PATH]

The reference has all texts in memory and lets `encode_batch_fast` use all cores; ours reads a JSONL
file, tokenizes in processes, and writes ids, offsets and checksum. Also with other numbers of
workers, and with the tokenizer of bytes.
"""

import json
import os
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import prepare
from config import usable_cores
from tests.bench.common import Figure, ratios

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
    texts = documents(options.text)
    texts, rounds = (texts[:300], 1) if options.quick else (texts, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "a.jsonl"
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        size = sum(len(text.encode()) for text in texts) / 1e6
        first = prepare.Options(out=str(folder / "t"), train_tokenizer=VOCAB)
        prepare.prepare([str(source)], first)
        tokenizer = str(folder / "t/tokenizer")
        fast = prepare.load_tokenizer(tokenizer).backend_tokenizer

        def alone():
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
            for i in range(0, len(texts), 1000):
                fast.encode_batch_fast(texts[i : i + 1000], add_special_tokens=False)

        def ours(**how):
            prepare.prepare([str(source)], prepare.Options(out=str(folder / "o"), **how))

        cores = usable_cores()
        kinds = {"tokenizers alone": alone}
        for workers in sorted({1, cores, 2 * cores}):
            kinds[f"data.py, {workers} workers"] = lambda n=workers: ours(
                tokenizer=tokenizer, workers=n
            )
        kinds["data.py, bytes"] = ours
        rates = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, run in kinds.items():
                began = time.perf_counter()
                run()
                rates[name].append(size / (time.perf_counter() - began))
    reference = rates["tokenizers alone"]
    return [
        Figure(f"text to tokens, {size:.0f} MB, {name}", f"tokenizers alone, {cores} cores",
               ratios(found, reference), ">= 0.8" if f" {cores} w" in name else "",
               f"{statistics.median(found):.1f} MB/s", f"{statistics.median(reference):.1f} MB/s")
        for name, found in rates.items() if found is not reference
    ]  # fmt: skip
