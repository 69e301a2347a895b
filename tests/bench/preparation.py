"""Text a second of `python data.py` against `tokenizers` alone on the same text, in one process.

    python tests/bench/preparation.py [--text PATH]

The reference has all texts in memory and lets `encode_batch_fast` use all cores; ours reads a JSONL
file, tokenizes in processes, and writes ids, offsets and checksum. Also with other numbers of
workers, and with the tokenizer of bytes.
"""

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import prepare  # noqa: E402
from config import usable_cores  # noqa: E402


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", help="a text file (default: the standard library's source)")
    parser.add_argument("--vocab_size", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    texts = documents(args.text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "a.jsonl"
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        size = sum(len(text.encode()) for text in texts) / 1e6
        first = prepare.Options(out=str(folder / "t"), train_tokenizer=args.vocab_size)
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
        for _ in range(args.rounds):
            for name, run in kinds.items():
                began = time.perf_counter()
                run()
                rates[name].append(size / (time.perf_counter() - began))
    print(f"{len(texts):,} documents, {size:.0f} MB, vocabulary {args.vocab_size}, {cores} cores")
    for name, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates["tokenizers alone"], strict=True)]
        print(f"{name:22s} {statistics.median(found):6.1f} MB/s ({min(found):.1f} to "
              f"{max(found):.1f}), {statistics.median(ratios):.2f} x ({min(ratios):.2f} to "
              f"{max(ratios):.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
