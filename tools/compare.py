"""python monitor.py compare A B: is B better than A, or is it the seed?

    python monitor.py compare "--learning_rate 0.01" "--learning_rate 0.02 --ema 0.99" --steps 300
    python monitor.py compare runs/001/config.yaml new.yaml --seeds 10 --json

Trains both arms with one seed after another. The same seed gives both the same samples, dropout and
initial weights (up to the first tensor of another shape), so the difference within a pair varies
far less than the losses. Compared are the final validation losses, of averaged weights with --ema.
"""

import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from data import load_data, what_is_evaluated
from steady.options import ConfigError, Failed, Parser, read_flags
from train import choose_run

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
B_IS_BETTER, A_IS_BETTER, NEITHER = 0, 3, 4  # exit codes

# After n pairs, n = 3 … 20, a difference is found if |t| exceeds this. Without a true difference
# the first n looks find one with a probability of 5 % x (1 - 2/n) / (1 - 2/20), however many pairs
# were planned: alpha spending (Lan and DeMets 1983, Biometrika 70, 659), calibrated on 16 million
# series of normal differences. Heavier tails err less often, strongly skewed ones up to 17 %.
CRITICAL = {3: 7.25, 4: 5.11, 5: 4.43, 6: 4.11, 7: 3.93, 8: 3.82, 9: 3.75, 10: 3.70, 11: 3.67,
            12: 3.64, 13: 3.62, 14: 3.60, 15: 3.59, 16: 3.59, 17: 3.58, 18: 3.58, 19: 3.58,
            20: 3.58}

FIXED_FLAGS = ["--json", "--sample_interval=0", "--save_interval=0", "--no_tensorboard",
               "--tracker=none", "--no_auto_resume", "--no_overwrite"]
ONLY_AT_THE_END = 10**12  # steps between evaluations


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


def open_arm(text: str, steps: int | None) -> tuple[list[str], str, dict]:
    """(flags, name of the compared loss, its validation samples) of a YAML file or flags."""
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
    val_data = load_data(cfg)[1]
    if not val_data:
        raise ConfigError(f"{text}: no validation data; name some with --val_data")
    evaluated = what_is_evaluated(cfg, val_data) | {"ema": None, "data_mode": val_data.mode}
    return flags, "val_loss_ema" if cfg.ema else "val_loss", evaluated


def train_once(name: str, flags: list[str], loss: str, seed: int) -> tuple[float, float | None]:
    """(loss, ms/step) at the end of a run. Raises Failed."""
    with tempfile.TemporaryDirectory(dir=".", prefix="compare-") as folder:
        command = [sys.executable, str(TRAIN), *flags, f"--seed={seed}", f"--out_dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    result = {} if done.returncode else json.loads(done.stdout.splitlines()[-1])
    if result.get(loss) is None:  # a non-finite loss is null
        last = (done.stdout + done.stderr).splitlines()[-12:]
        raise Failed("\n".join([f"{name} with --seed {seed}: exit code {done.returncode}, no "
                                f"{loss}; its last lines:", *last]))
    return result[loss], result["step_ms"]


def compare(argv: list[str]) -> int:
    """Returns the exit code: 0 if B is better, 3 if A is, 4 if neither is known to be."""
    parser = Parser("monitor.py compare", allow_abbrev=False, description="Is B better than A? "
                    "Trains both with the same seeds, and compares validation losses in pairs.",
                    epilog="It ends as soon as a difference is found, with an error of at most 5 % "
                    "over all looks, or after three pairs without any. Exit codes: 0 B is better, "
                    "3 A is, 4 neither is known to be; 1 a run failed, 2 wrong usage.")
    parser.add_argument("A", help="a YAML file of options, or flags of train.py in quotes")
    parser.add_argument("B", help="another")
    parser.add_argument("--steps", type=int, metavar="N",
                        help="--max_steps of both (default: as in their options)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N",
                        help="pairs at most, 3 to 20 (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if argv[:1] not in (["-h"], ["--help"]):  # argparse takes flags after a space for values
        argv = [*(f" {arm}" for arm in argv[:2]), *argv[2:]]
    args = read_flags(parser, argv)
    if args.seeds not in CRITICAL:
        raise ConfigError(f"--seeds {args.seeds}: expected 3 to 20")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current run, too
    arms = {"A": open_arm(args.A.strip(), args.steps), "B": open_arm(args.B.strip(), args.steps)}
    if arms["A"][2] != arms["B"][2]:
        raise ConfigError("A and B have different validation samples; expected the same "
                          "--val_data, --seq_len and --data_mode, and the same product of "
                          "--eval_steps and --batch_size")

    screen = sys.stderr if args.json else sys.stdout
    losses, differences, speeds = [], [], []
    for seed in range(1, args.seeds + 1):
        pair = {}
        for name in "AB" if seed % 2 else "BA":  # a drift of the machine affects both
            flags, loss, _ = arms[name]
            pair[name] = train_once(name, flags, loss, seed)
        (a, a_ms), (b, b_ms) = pair["A"], pair["B"]
        losses.append([a, b])
        differences.append(b - a)
        if a_ms and b_ms:
            speeds.append(b_ms / a_ms)
        print(f"seed {seed}: A {a:.4f}, B {b:.4f}, difference {b - a:+.4f}", file=screen,
              flush=True)
        if settled(differences):
            break

    (mean, half), (text, code) = interval(differences), verdict(differences)
    ratio = statistics.median(speeds) if speeds else None
    if args.json:
        better = {B_IS_BETTER: "B", A_IS_BETTER: "A", NEITHER: None}[code]
        print(json.dumps(dict(
            verdict=text, better=better, difference=mean, interval=[mean - half, mean + half],
            compared=[arms["A"][1], arms["B"][1]], losses=losses, step_ms_ratio=ratio)))
        return code
    print(f"loss    B - A = {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})")
    if ratio:
        print(f"speed   ms/step of B / A = {ratio:.3f} (median)")
    print(f"verdict {text}")
    return code
