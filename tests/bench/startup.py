"""Seconds from the command to the first step's log line, against `import torch`, alternating.

python tests/bench/startup.py
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def seconds_until(command: list[str], words: str, folder: str) -> float:
    """Until a line with `words` is printed, or the command ends where words is empty."""
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if words in line:
                break
        else:
            process.wait()
        found = time.perf_counter() - began
        process.kill()
    return found


def main():
    first, imports = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(TRAIN), "--eval_interval", "0", "--save_interval", "0"]
        for _ in range(6):
            first.append(seconds_until(run, "step    1/", folder))
            imports.append(seconds_until([sys.executable, "-c", "import torch"], "", folder))
    first, imports = first[1:], imports[1:]  # the first makes the corpus and warms the disk
    ratios = sorted(f / i for f, i in zip(first, imports, strict=True))
    print(f"first step {statistics.median(first):.2f} s, torch {statistics.median(imports):.2f} s")
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
