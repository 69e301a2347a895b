"""kill -9 at a random moment, then resume: does a run end like one never stopped?

    python -m tests.bench resume --nanogpt DIR --peers DIR

--peers names a folder with virtual environments: trl and litgpt (with litdata), with these packages
installed, and nanochat, with its checkout on Python's path. RESUME_ONLY=NAME tries one program,
RESUME_KILLS another number of times.

The same trial for each program as it is, on one thread of a CPU: 40 steps with dropout, a
checkpoint at every tenth, killed within a random step, resumed in its own way. Final weights are
compared bit for bit with those of its undisturbed run, and so are the samples since the resume.
Then without dropout and in fp32, resumed on two processes: there weights may differ by rounding.
"""

import itertools
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
import numpy as np, datasets
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

dropout, ranks, how = float(sys.argv[1]), int(sys.argv[2]), dict()
tokens = np.fromfile("data/shakespeare_char/train.bin", np.uint16).astype(int)
rows = tokens[: len(tokens) // 64 * 64].reshape(-1, 64).tolist()
if sys.argv[3] == "trl":
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig as TrainingArguments, SFTTrainer as Trainer
    words = Tokenizer(models.WordLevel({{"!": 0}}, "!"))
    how["processing_class"] = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="!",
                                                      eos_token="!")

set_seed(1)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=256, hidden_size=128, intermediate_size=336, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, attention_dropout=dropout))
trainer = Trainer(model, TrainingArguments(
    "out", max_steps={STEPS}, per_device_train_batch_size=12 // ranks, save_steps={EVERY},
    logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True),
    train_dataset=datasets.Dataset.from_dict(dict(input_ids=rows, labels=rows)), **how)
trainer.train(resume_from_checkpoint=Path("out").exists() and get_last_checkpoint("out"))
"""

CHUNKS = """
import numpy as np, torch
from litdata import TokensLoader, optimize

def tokens(file):
    yield torch.from_numpy(np.fromfile(file, np.uint16).astype(int))

if __name__ == "__main__":
    optimize(tokens, ["data/shakespeare_char/train.bin"], "chunks", num_workers=1,
             chunk_size=65 * 20_000, item_loader=TokensLoader())
"""


# A sitecustomize.py: each process writes a hash of every sequence that a model is trained on.
RECORDER = """
import os, torch

def embedding(input, *args, **kwargs):
    if input.ndim == 2 and not input.is_meta and torch.is_grad_enabled():
        with open(f"samples.{os.getpid()}", "a") as file:
            file.writelines(f"{hash(tuple(row))}\\n" for row in input.tolist())
    return plain(input, *args, **kwargs)

plain, torch.nn.functional.embedding = torch.nn.functional.embedding, embedding
"""


class Ours:
    name, logged = "steady", r"step +\d+"

    def __init__(self, folder: Path, options):
        self.folder, self.peers = folder, options.peers

    def prepare(self, text: str):
        write_characters(text, self.folder / "data/shakespeare_char")

    def python(self, peer: str) -> Path:
        return Path(self.peers).resolve() / peer / "bin/python"

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        return [*launcher(ranks), TRAIN, *FLAGS, "--data", "data/shakespeare_char", "--out_dir",
                "out", "--vocab_size", 256, "--dropout", dropout, "--max_steps", STEPS,
                "--save_interval", EVERY, "--log_interval", 1, "--device", "cpu", "--auto_resume",
                "--precision", "auto" if dropout else "fp32"]

    def weights(self) -> dict:
        return latest_valid(self.folder / "out/checkpoints").state()["model"]

    def samples(self) -> list[str]:
        """Those since the last call, in their order if one process was trained."""
        files = [*self.folder.glob("samples.*")]
        found = [line for file in files for line in file.read_text().split()]
        for file in files:
            file.unlink()
        return found


class HuggingFace(Ours):
    name, logged = "transformers' Trainer", "'loss'"

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        (self.folder / "train.py").write_text(TRAINER)
        return [*launcher(ranks), "train.py", dropout, ranks, "transformers"]

    def weights(self) -> dict:
        from safetensors.torch import load_file

        return load_file(self.folder / f"out/checkpoint-{STEPS}/model.safetensors")


class TRL(HuggingFace):
    name = "TRL's SFTTrainer"

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        return [self.python("trl"), *super().command(dropout, ranks, again)[1:-1], "trl"]


class LitGPT(Ours):
    """Has no dropout."""

    name, logged = "litgpt", r"iter \d+ step"

    def prepare(self, text: str):
        super().prepare(text)
        (self.folder / "prepare.py").write_text(CHUNKS)
        subprocess.run([self.python("litgpt"), "prepare.py"], cwd=self.folder, check=True)

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        shape = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=256,
                     padded_vocab_size=256)
        return ["env", "TORCH_COMPILE_DISABLE=1", self.python("litgpt"), "-m", "litgpt", "pretrain",
                "none", *(f"--model_config.{name}={value}" for name, value in shape.items()),
                "--data=LitData", "--data.data_path=chunks", "--data.num_workers=0",
                "--precision=32-true", "--devices=1", "--eval.max_iters=1", "--logger_name=csv",
                "--out_dir=out", "--train.max_seq_length=64", "--train.micro_batch_size=12",
                "--train.global_batch_size=12", f"--train.max_tokens={STEPS * 12 * 64}",
                f"--train.save_interval={EVERY}", "--train.lr_warmup_steps=2", "--resume=auto"]

    def weights(self) -> dict:
        return torch.load(self.folder / "out/final/lit_model.pth", weights_only=False)["model"]


class Nanochat(Ours):
    """Has no dropout."""

    name, logged = "nanochat", r"step \d+/"

    def run(self, *command) -> list:
        return ["env", f"NANOCHAT_BASE_DIR={self.folder}", self.python("nanochat"), "-m", *command]

    def prepare(self, text: str):
        import pyarrow
        from pyarrow.parquet import write_table

        (self.folder / "base_data_climbmix").mkdir(parents=True)
        documents = pyarrow.table(dict(text=text.split("\n\n")))
        for name in ("train", "val"):  # the last file is for validation
            write_table(documents, self.folder / f"base_data_climbmix/{name}.parquet", 128)
        subprocess.run(self.run("scripts.tok_train", "--vocab-size=512"), check=True,
                       stdout=subprocess.DEVNULL)

    def command(self, dropout: float, ranks: int, again: bool) -> list:
        saved = sorted(self.folder.glob("base_checkpoints/d2/optim_*"))  # written last
        resume = [f"--resume-from-step={int(saved[-1].stem.split('_')[1])}"] if saved else []
        return self.run("scripts.base_train", "--depth=2", "--head-dim=64", "--max-seq-len=64",
                        "--window-pattern=L", "--device-batch-size=12", "--total-batch-size=768",
                        f"--num-iterations={STEPS}", f"--save-every={EVERY}", "--eval-every=-1",
                        "--core-metric-every=-1", "--sample-every=-1", "--device-type=cpu", *resume)

    def weights(self) -> dict:
        return torch.load(self.folder / f"base_checkpoints/d2/model_{STEPS:06}.pt",
                          weights_only=True)


class NanoGPT(Ours):
    name, logged = "nanoGPT", r"iter \d+"

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


def start(program, steps: int, *how) -> subprocess.Popen:
    """Returns once so many steps are logged, or it has ended."""
    process = subprocess.Popen(
        [*map(str, program.command(*how))], cwd=program.folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                          "PYTHONPATH": str(program.folder)})
    logged = (line for line in process.stdout if re.search(program.logged, line))
    for _ in itertools.islice(logged, steps):
        pass
    return process


def finish(process: subprocess.Popen) -> int:
    process.communicate()
    return process.returncode


def trials(kind, options, kills: int, dropout: float, ranks: int) -> Counter:
    """How often a run that is killed once ends in each way."""
    found, when = Counter(), random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, str(i)) for i in range(kills + 1)]
        program = kind(folders[0], options)
        program.prepare(some_text(options))
        (folders[0] / "sitecustomize.py").write_text(RECORDER)
        for folder in folders[1:]:
            shutil.copytree(folders[0], folder)
        process, began = start(program, 1, dropout, 1, False), time.monotonic()
        assert finish(process) == 0, f"{program.name} does not run"
        a_step = (time.monotonic() - began) / STEPS  # about
        whole, all_samples = program.weights(), program.samples()
        assert all_samples, f"{program.name} embeds its tokens in a way of its own"
        for folder in folders[1:]:
            program = kind(folder, options)
            process = start(program, when.randint(1, STEPS - 1), dropout, 1, False)
            time.sleep(when.uniform(0, a_step))
            os.killpg(process.pid, signal.SIGKILL)
            finish(process)
            program.samples()
            ended = finish(start(program, 1, dropout, ranks, True)) == 0
            end = outcome(whole, program.weights()) if ended else "not resumed"
            samples = program.samples()
            if sorted(samples) != sorted(all_samples[len(all_samples) - len(samples):]):
                end += " after other samples"
            print(f"{program.name}, {ranks} processes: {end}", flush=True)
            found[end] += 1
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
        kills = int(os.environ.get("RESUME_KILLS", kills))
        kinds = [Ours, HuggingFace, *([TRL] if options.peers else [])]
        if ranks == 1:  # on several processes these need CUDA
            kinds += [NanoGPT] * bool(options.nanogpt) + [LitGPT, Nanochat] * bool(options.peers)
        kinds = kinds[:1] if options.quick else kinds
        kinds = [kind for kind in kinds if os.environ.get("RESUME_ONLY", kind.name) == kind.name]
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
