"""python monitor.py compare A B: is B better than A, or is it the seed?

    python monitor.py compare "--learning_rate 0.01" "--learning_rate 0.02 --ema 0.99" --steps 300
    python monitor.py compare runs/001/config.yaml new.yaml --seeds 10 --json

Trains both arms with one seed after another. The same seed gives both the same samples, dropout and
initial weights (up to the first tensor of another shape), so the difference within a pair varies
far less than the losses. Compared are the final validation losses, of averaged weights with --ema.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from data import eval_samples, load_data
from steady.models import huggingface
from steady.options import ConfigError, Failed, Parser, read_flags
from train import choose_run

ROOT = Path(__file__).resolve().parent.parent
B_IS_BETTER, A_IS_BETTER, NEITHER = 0, 3, 4  # exit codes; 3 is also a regression

# After n pairs, n = 3 … 20, a difference is found if |t| exceeds this. Without a true difference
# the first n looks find one with a probability of 5 % x (1 - 2/n) / (1 - 2/20), however many pairs
# were planned: alpha spending (Lan and DeMets 1983, Biometrika 70, 659), calibrated on 16 million
# series of normal differences. Heavier tails err less often, strongly skewed ones up to 17 %.
CRITICAL = {3: 7.25, 4: 5.11, 5: 4.43, 6: 4.11, 7: 3.93, 8: 3.82, 9: 3.75, 10: 3.70, 11: 3.67,
            12: 3.64, 13: 3.62, 14: 3.60, 15: 3.59, 16: 3.59, 17: 3.58, 18: 3.58, 19: 3.58,
            20: 3.58}

FIXED_FLAGS = ["--json", "--sample_interval=0", "--save_interval=0", "--no_tensorboard",
               "--no_wandb", "--no_auto_resume", "--no_overwrite"]
ONLY_AT_THE_END = 10**12  # steps between evaluations

# --- the statistics --------------------------------------------------------------------------


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval, valid over all looks; infinite below 3."""
    mean, n = statistics.fmean(differences), len(differences)
    if n not in CRITICAL:
        return mean, math.inf
    return mean, CRITICAL[n] * statistics.stdev(differences) / math.sqrt(n)


def settled(differences: list[float]) -> bool:
    """True once a difference is found, or three pairs show none at all."""
    mean, half = interval(differences)
    return abs(mean) > half or len(differences) in CRITICAL and not any(differences)


def verdict(differences: list[float]) -> tuple[str, int]:
    """(one line, exit code) for differences of the losses, B - A."""
    mean, half = interval(differences)
    n = f"({len(differences)} pairs)"
    if not any(differences):
        return f"A and B are the same: no difference at all {n}", NEITHER
    if abs(mean) <= half:
        return f"no difference larger than {abs(mean) + half:.2g} nats is seen {n}", NEITHER
    better, code = ("B", B_IS_BETTER) if mean < 0 else ("A", A_IS_BETTER)
    return f"{better} is better by {abs(mean):.3g} ±{half:.2g} nats {n}", code


# --- the runs --------------------------------------------------------------------------------


@dataclasses.dataclass
class Arm:
    flags: list[str]
    loss: str  # name of the compared loss
    evaluated: list  # identifies the validation samples
    identity: list  # all that its results depend on besides seed, code and versions


def open_arm(text: str, steps: int | None) -> Arm:
    """Raises ConfigError for flags that its runs would refuse."""
    try:
        flags = ["--config", text] if text.endswith((".yaml", ".yml")) else shlex.split(text)
    except ValueError as e:
        raise ConfigError(f"{text}: {e}") from None
    flags += [*FIXED_FLAGS, *([f"--max_steps={steps}"] if steps is not None else [])]
    cfg, _ = choose_run(flags)
    if cfg.resume or cfg.backup_to or cfg.eval_only:
        raise ConfigError(f"{text}: --resume, --backup_to and --eval_only cannot be compared")
    if not cfg.patience:  # needs evaluations on the way
        flags.append(f"--eval_interval={ONLY_AT_THE_END}")
    train_data, val_data = load_data(cfg)
    if not val_data:
        raise ConfigError(f"{text}: no validation data; name some with --val_data")
    evaluated = [val_data.fingerprint, [str(d.weight) for d in val_data.datasets], val_data.mode,
                 cfg.seq_len, eval_samples(cfg, val_data)]
    options = dataclasses.asdict(dataclasses.replace(cfg, seed=0, config=None))
    initial = huggingface.fingerprint(cfg.init_from) if cfg.init_from else ""
    return Arm(flags, "val_loss_ema" if cfg.ema else "val_loss", evaluated,
               [options, evaluated, train_data.fingerprint, initial])


def comparison_id(arms: dict[str, Arm]) -> str:
    """A hash of both arms, their data, the code of this repository, Python and torch."""
    files = sorted([*ROOT.glob("*.py"), *ROOT.glob("steady/**/*.py")])
    code = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    parts = [[arm.identity for arm in arms.values()], code, sys.version, torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def train_once(name: str, arm: Arm, seed: int, out_dir: Path) -> dict:
    """Results of a run as train.py prints them at its end. Raises Failed."""
    with tempfile.TemporaryDirectory(dir=out_dir, prefix="run-") as folder:
        command = [sys.executable, str(ROOT / "train.py"), *arm.flags, f"--seed={seed}",
                   f"--out_dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    result = {} if done.returncode else json.loads(done.stdout.splitlines()[-1])
    if result.get(arm.loss) is None:  # a non-finite loss is null
        last = (done.stdout + done.stderr).splitlines()[-12:]
        raise Failed("\n".join([f"{name} with --seed {seed}: exit code {done.returncode}, no "
                                f"{arm.loss}; its last lines:", *last]))
    return result


def run_pairs(arms: dict[str, Arm], seeds: int, out_dir: Path, screen) -> list[dict]:
    """Train both arms with one seed after another until settled, reusing results of before."""
    out_dir.mkdir(parents=True, exist_ok=True)
    file, comparison, results, pairs = out_dir / "results.jsonl", comparison_id(arms), {}, []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # torn when the machine went down
            row = json.loads(line)
            if row["comparison"] == comparison:
                results[row["arm"], row["seed"]] = row
    for seed in range(1, seeds + 1):
        for name in "AB" if seed % 2 else "BA":  # a drift of the machine affects both
            if (name, seed) not in results:
                row = results[name, seed] = train_once(name, arms[name], seed, out_dir)
                row |= dict(comparison=comparison, arm=name, seed=seed, flags=arms[name].flags)
                with open(file, "a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row) + "\n")
        pair = [results[name, seed] for name in arms]
        a, b = (row[arm.loss] for row, arm in zip(pair, arms.values(), strict=True))
        pairs.append(dict(seed=seed, loss=[a, b], difference=b - a,
                          step_ms=[row["step_ms"] for row in pair]))
        print(f"seed {seed}: A {a:.4f}, B {b:.4f}, difference {b - a:+.4f}", file=screen,
              flush=True)
        if settled([pair["difference"] for pair in pairs]):
            break
    return pairs


def compare(argv: list[str]) -> int:
    """Returns the exit code: 0 if B is better, 3 if A is, 4 if neither is known to be."""
    parser = Parser("monitor.py compare", allow_abbrev=False, description="Is B better than A? "
                    "Trains both with the same seeds, and compares validation losses in pairs.",
                    epilog="It ends as soon as a difference is found, with an error of at most 5 % "
                    "over all looks, or after three pairs without any. The same command continues "
                    "an interrupted comparison, also with more --seeds. Exit codes: 0 B is better, "
                    "3 A is, 4 neither is known to be; 1 a run failed, 2 wrong usage.")
    parser.add_argument("A", help="a YAML file of options, or flags of train.py in quotes")
    parser.add_argument("B", help="another")
    parser.add_argument("--steps", type=int, metavar="N",
                        help="--max_steps of both (default: as in their options)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N",
                        help="pairs at most, 3 to 20 (default: 5)")
    parser.add_argument("--out_dir", type=Path, default=Path("compare"), metavar="DIR",
                        help="folder of results.jsonl, a line for each run (default: compare)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if argv[:1] not in (["-h"], ["--help"]):  # argparse takes flags after a space for values
        argv = [*(f" {arm}" for arm in argv[:2]), *argv[2:]]
    args = read_flags(parser, argv)
    if args.seeds not in CRITICAL:
        raise ConfigError(f"--seeds {args.seeds}: expected 3 to 20")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current run, too
    arms = {"A": open_arm(args.A.strip(), args.steps), "B": open_arm(args.B.strip(), args.steps)}
    if arms["A"].evaluated != arms["B"].evaluated:
        raise ConfigError("A and B have different validation samples; expected the same "
                          "--val_data, --seq_len and --data_mode, and the same product of "
                          "--eval_steps and --batch_size")
    pairs = run_pairs(arms, args.seeds, args.out_dir, sys.stderr if args.json else sys.stdout)
    differences = [pair["difference"] for pair in pairs]
    (mean, half), (text, code), ratio = interval(differences), verdict(differences), None
    if all(all(pair["step_ms"]) for pair in pairs):  # the geometric mean of B / A
        middle, width = interval([math.log(b / a) for a, b in (pair["step_ms"] for pair in pairs)])
        ratio = [math.exp(x) for x in (middle, middle - width, middle + width)]
    if args.json:
        better = {B_IS_BETTER: "B", A_IS_BETTER: "A", NEITHER: None}[code]
        print(json.dumps(dict(
            verdict=text, better=better, difference=mean, interval=[mean - half, mean + half],
            losses=[arm.loss for arm in arms.values()], step_ms_ratio=ratio, pairs=pairs)))
        return code
    print(f"loss    B - A = {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})")
    if ratio:
        print("speed   ms/step of B / A = {:.3f} ({:.3f} to {:.3f})".format(*ratio))
    print(f"verdict {text}")
    return code
