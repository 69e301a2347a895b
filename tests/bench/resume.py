"""kill -9 at a random moment, then resume: does a run end like one never stopped?

    python -m tests.bench resume --nanogpt DIR

The same trial for each program as it is, on one thread of a CPU: 40 steps with dropout, a
checkpoint at every tenth, and its own way to resume. Its final weights are compared, bit for bit,
with those of its undisturbed run. Then without dropout, resumed on two processes: there they may
differ by rounding.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from steady.checkpoints.checkpoint import latest_valid
from tests.bench.common import Figure
from tests.bench.small import FLAGS, nanogpt, some_text, write_characters
from tests.bench.startup import TRAIN

STEPS, EVERY, ROUNDING = 40, 10, 1e-4  # of the largest weight

TRAINER = f"""
import sys
import numpy as np, torch
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

dropout, ranks = float(sys.argv[1]), int(sys.argv[2])
tokens = torch.from_numpy(np.fromfile("data/shakespeare_char/train.bin", np.uint16).astype(int))

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(tokens) // 64

    def __getitem__(self, i):
        row = tokens[64 * i : 64 * i + 64]
        return dict(input_ids=row, labels=row)

set_seed(1)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=256, hidden_size=128, intermediate_size=336, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, attention_dropout=dropout))
trainer = Trainer(model, TrainingArguments(
    "out", max_steps={STEPS}, per_device_train_batch_size=12 // ranks, save_steps={EVERY},
    logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True), train_dataset=Rows())
trainer.train(resume_from_checkpoint=Path("out").exists() and get_last_checkpoint("out"))
"""


class Ours:
    name, begun = "steady", r"step +\d+"

    def __init__(self, folder: Path, options):
        self.folder = folder

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        return [*launcher(ranks), TRAIN, *FLAGS, "--data", "data/shakespeare_char", "--out_dir",
                "out", "--vocab_size", 256, "--dropout", dropout, "--max_steps", STEPS,
                "--save_interval", EVERY, "--log_interval", 1, "--device", "cpu", "--auto_resume"]

    def weights(self) -> dict:
        return latest_valid(self.folder / "out/checkpoints").state()["model"]


class HuggingFace(Ours):
    name, begun = "transformers' Trainer", "'loss'"

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        (self.folder / "train.py").write_text(TRAINER)
        return [*launcher(ranks), "train.py", dropout, ranks]

    def weights(self) -> dict:
        from safetensors.torch import load_file

        return load_file(self.folder / f"out/checkpoint-{STEPS}/model.safetensors")


class NanoGPT(Ours):
    name, begun = "nanoGPT", r"iter \d+"

    def __init__(self, folder: Path, options):
        self.folder, self.checkout = folder, options.nanogpt

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        saved = again and (self.folder / "out/ckpt.pt").exists()
        return nanogpt(self.folder, self.checkout, STEPS, f"--eval_interval={EVERY}",
                       "--eval_iters=1", "--log_interval=1", "--always_save_checkpoint=True",
                       f"--dropout={dropout}", "--out_dir=out",
                       f"--init_from={'resume' if saved else 'scratch'}")

    def weights(self) -> dict:
        saved = torch.load(self.folder / "out/ckpt.pt", weights_only=True)
        return saved["model"] if saved["iter_num"] == STEPS else {}


def launcher(ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def start(program, *how) -> subprocess.Popen:
    """Returns once its first step is logged, or it has ended."""
    process = subprocess.Popen(
        [*map(str, program.command(*how))], cwd=program.folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    for line in process.stdout:
        if re.search(program.begun, line):
            break
    return process


def finish(process: subprocess.Popen) -> int:
    process.communicate()
    return process.returncode


def trials(kind, options, kills: int, dropout: float, ranks: int) -> Counter:
    """How often a run that is killed once ends in each way."""
    found, when = Counter(), random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, str(i)) for i in range(kills + 1)]
        write_characters(some_text(options), folders[0] / "data/shakespeare_char")
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        program = kind(folders[0], options)
        process, began = start(program, dropout, 1, False), time.monotonic()
        assert finish(process) == 0, f"{program.name} does not run"
        seconds, whole = time.monotonic() - began, program.weights()
        for folder in folders[1:]:
            program = kind(folder, options)
            process = start(program, dropout, 1, False)
            time.sleep(when.uniform(0, seconds))
            os.killpg(process.pid, signal.SIGKILL)
            finish(process)
            ended = finish(start(program, dropout, ranks, True)) == 0
            found[outcome(whole, program.weights()) if ended else "not resumed"] += 1
    return found


def outcome(whole: dict, resumed: dict) -> str:
    if whole.keys() != resumed.keys():
        return "not finished"
    if all(torch.equal(whole[name], resumed[name]) for name in whole):
        return "equal"
    most = max(float((whole[name] - resumed[name]).abs().max()) for name in whole)
    largest = max(float(tensor.abs().max()) for tensor in whole.values())
    return "equal but for rounding" if most < ROUNDING * largest else "other weights"


def main(options) -> list[Figure]:
    figures = []
    for what, dropout, ranks, kills in (("bit for bit", 0.1, 1, 1 if options.quick else 20),
                                        ("within rounding, on two processes", 0.0, 2, 5)):
        kinds = [Ours, HuggingFace, *([NanoGPT] if options.nanogpt and ranks == 1 else [])]
        kinds = kinds[:1] if options.quick else kinds
        ends = {kind.name: trials(kind, options, kills, dropout, ranks) for kind in kinds}
        good = {name: found["equal"] + (ranks > 1) * found["equal but for rounding"]
                for name, found in ends.items()}
        for name, found in ends.items():
            shown = ", ".join(f"{n} {end}" for end, n in found.most_common())
            figures.append(Figure(f"killed and resumed: ends {what}", f"all of {kills} kills",
                                  [good[name] / kills], ">= 1", f"{name}: {shown}"))
        if options.quick:
            break
    return figures
