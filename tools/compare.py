"""python monitor.py compare A B: is B better than A, or is it the seed?

    python monitor.py compare HEAD . --steps 200
    python monitor.py compare "" "--learning_rate 0.02" --data tokens --json

The same seed gives both arms the same samples, dropout and initial weights (up to the first tensor
of another shape). The final losses are compared; with --ema, those of the averaged weights.
"""

import contextlib
import hashlib
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data import load_data, what_is_evaluated
from steady.models.device import device_name, pick_device
from steady.models.huggingface import fingerprint, folders
from steady.options import ConfigError, Failed, Parser, normal_form, reading_paths
from train import choose_run

ROOT = Path(__file__).resolve().parent.parent
LEDGER = Path("experiments.jsonl")

# All comparisons of a ledger together find a difference that is not there with a probability of
# at most 10 %, so B is wrongly preferred in 5 %. Each look has a fifth of a comparison's level.
ERROR, LOOKS, ROUNDING = 0.1, (3, 5, 8, 13, 20), 1e-5  # nats: less is rounding

FIXED_FLAGS = ["--json", "--sample_interval=0", "--save_interval=0", "--no_tensorboard",
               "--tracker=none", "--no_auto_resume", "--no_overwrite", f"--eval_interval={10**12}"]
REFUSED = "resume backup_to eval_only patience verify_resume check_checkpoints estimate".split()


def level_of(k: int) -> float:
    """The error of comparison k = 1, 2, … of a ledger."""
    return ERROR * 5 / ((k + 4) * (k + 5))


def critical(n: int, level: float) -> float:
    """|t| exceeds this with probability `level`: Student's t of n normal values around 0.

    With t = sqrt(n - 1) / tan(u), the density of u is proportional to sin(u)^(n - 2).
    """
    u = np.geomspace(1e-8, math.pi / 2, 100_000)
    tail = np.cumsum(np.sin(u) ** (n - 2) * u)
    return math.sqrt(n - 1) / np.tan(np.interp(level * tail[-1], tail, u))


def interval(values, level: float) -> tuple[float, float]:
    """The mean of 2 or more values, and half the width of its interval, valid over all looks."""
    n = np.shape(values)[-1]
    half = critical(n, level / len(LOOKS)) * np.std(values, -1, ddof=1) / n**0.5
    return np.mean(values, -1), half


def difference(losses, level: float) -> tuple[float, float]:
    """The mean of B - A over pairs (A, B), and half the width of its interval.

    Wider by the ratio of the arms' standard deviations where the better one varies more: its rare
    bad runs may be missing among the pairs. A deviation counts as a twentieth of the mean at least.
    """
    a, b = np.moveaxis(np.array(losses), -1, 0)
    mean, half = interval(b - a, level)
    better, other = np.where(mean < 0, (b.std(-1), a.std(-1)), (a.std(-1), b.std(-1)))
    return mean, half * np.maximum(1, better / np.maximum(other, ROUNDING + abs(mean) / 20))


def verdict(losses: list[tuple[float, float]], level: float) -> tuple[str, str | None]:
    """(one line, "A", "B" or None: the better one) for pairs (A, B)."""
    mean, half = difference(losses, level)
    if all(a == b for a, b in losses):
        return "A and B are the same: no difference at all", None
    if abs(mean) <= max(half, ROUNDING):
        return f"no difference larger than {abs(mean) + half:.2g} nats is seen", None
    better = "B" if mean < 0 else "A"
    return f"{better} is better by {abs(mean):.3g} ±{half:.2g} nats", better


class Arm(NamedTuple):
    title: str  # in the ledger
    code: Path  # folder
    flags: list[str]
    ema: bool  # averages weights, by the code that compares
    evaluated: dict  # the validation samples
    key: str | None  # with --reuse: runs of equal keys and seeds have equal losses


@reading_paths()  # there may be no git
def git(*command: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"git {command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def open_arm(text: str, more: list[str], folder: Path, reuse: bool) -> Arm:
    """An arm of a revision, checked out into `folder`, a YAML file or flags. Raises ConfigError."""
    title, code, flags = text or "the defaults", ROOT, []
    if text.startswith("-"):
        try:
            flags = shlex.split(text)
        except ValueError as e:
            raise ConfigError(f"{text}: {e}") from None
    elif text.endswith((".yaml", ".yml")):
        flags = ["--config", text]
    elif text == ".":
        title = f"the files after {git('log', '-1', '--format=%h %s')}"
    elif text:
        title = git("log", "-1", "--format=%h %s", text, "--")
        code = folder / git("rev-parse", "--show-prefix")  # no worktree: it would outlive a kill
        git("-C", git("rev-parse", "--show-toplevel"), "archive", f"--output={folder}.tar", text)
        shutil.unpack_archive(f"{folder}.tar", folder)
    cfg, _ = choose_run([*flags, *more, *FIXED_FLAGS])
    twice = sum(flag[:8] == "--config" for flag in [*flags, *more]) > 1  # one would have no effect
    if twice or "--seed" in text or any(getattr(cfg, name) for name in REFUSED):  # seeds are equal
        raise ConfigError(f"{text}: not with --seed, two --config, --{', --'.join(REFUSED)}")
    _, val_data = data = load_data(cfg)
    if not val_data:
        raise ConfigError(f"{text}: no validation data; name some with --val_data")
    evaluated = what_is_evaluated(cfg, val_data) | {"data_mode": val_data.mode}
    flags = [*flags, *more, f"--eval_steps={cfg.eval_steps}"]  # overrides a revision's default
    key = key_of(code, cfg, evaluated, *data) if reuse and not cfg.max_minutes else None
    return Arm(title, code, flags, evaluated.pop("ema"), evaluated, key)


def key_of(code: Path, cfg, evaluated: dict, *data) -> str:
    """A hash of code, options, model, data, torch, device. Raises OSError."""
    files = {str(path.relative_to(code)): path for path in sorted(code.rglob("*.py"))}
    files |= {"": folders(cfg.init_from)[-1] / "config.json"} if cfg.init_from else {}
    texts = [(name, path.read_bytes()) for name, path in files.items()
             if "site-packages" not in name and path.is_file()]
    facts = (texts, cfg, cfg.init_from and fingerprint(cfg.init_from), torch.__version__,
             device_name(pick_device(cfg.device, 0)), evaluated, [one.fingerprint for one in data])
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def result_of(name: str, arm: Arm, seed: int) -> dict:
    """The loss, ms/step and GB of a run, or of an earlier one with this key. Raises Failed."""
    run = arm.key and f"{arm.key} {seed}"
    for row in objects(LEDGER) if run else ():
        if row.get("run") == run:
            return row["result"] | dict(step_ms=None)  # measured at another time
    with tempfile.TemporaryDirectory(dir=".", prefix="compare-") as folder:
        command = [sys.executable, str(arm.code / "train.py"), *arm.flags, *FIXED_FLAGS,
                   f"--seed={seed}", f"--out_dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", input="")
        rows = objects(Path(folder, "metrics.jsonl"), *done.stdout.splitlines())
        end = {key: value for row in rows for key, value in row.items()}
    evaluated = arm.evaluated | {"ema": arm.ema} | end.get("evaluated", {})  # with its own defaults
    loss = "val_loss_ema" if evaluated.pop("ema") else "val_loss"
    wrong = f"evaluates {evaluated}; expected {arm.evaluated}" * (evaluated != arm.evaluated)
    if done.returncode or end.get(loss) is None:  # a non-finite loss is null
        wrong = f"exit code {done.returncode}, no {loss}"
    if wrong:
        raise Failed("\n".join([f"{name} with --seed {seed}: {wrong}; its last lines:",
                                *(done.stdout + done.stderr).splitlines()[-12:]]))
    result = dict(loss=end[loss], name=loss, step_ms=end.get("step_ms"),
                  memory=end.get("peak_gb") or end.get("rss_gb"))
    if run:
        note(dict(run=run, result=result))
    return result


def objects(path: Path, *more: str):
    """The objects among the lines of JSON in a file, if it exists, and among `more`."""
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    for line in (*lines, *more):
        with contextlib.suppress(ValueError, TypeError):  # cut off by a kill, or not ours
            yield dict(json.loads(line, parse_constant=lambda name: None))


def note(row: dict):
    with open(LEDGER, "a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(row)}\n")


def compare(argv: list[str]) -> int:
    """Returns the exit code: 0 if B is better, 3 if A is, 4 if neither is known to be."""
    if argv == ["--ledger"]:
        rows = [row for row in objects(LEDGER) if isinstance(row.get("difference"), int | float)]
        for row in sorted(rows, key=lambda row: row["difference"]):
            print(f"{row['difference']:+.4f} nats, {row.get('step_ms_ratio') or math.nan:.2f} x "
                  f"ms/step: {row.get('verdict')}; A: {row.get('A')}; B: {row.get('B')}")
        return 0
    parser = Parser("monitor.py compare", allow_abbrev=False, description="Is B better than A? "
                    "Trains both with the same seeds.", epilog="Other flags are for both. Exit "
                    "codes: 0 B is better, 3 A, 4 neither. `compare --ledger` prints all so far.")
    parser.add_argument("A", help="a git revision, . (as it is), a YAML file, or flags in quotes")
    parser.add_argument("B", help="another of these")
    parser.add_argument("--steps", type=int, metavar="N", help="--max_steps of both")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", choices=range(3, 21),
                        help="pairs at most, 3 to 20 (default: 8)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the first (default: 1)")
    parser.add_argument("--reuse", action="store_true", help="take known losses from the ledger")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if argv[:1] not in (["-h"], ["--help"]):  # argparse takes flags after a space for values
        argv = [*(f" {arm}" for arm in argv[:2]), *argv[2:]]
    args, more = parser.parse_known_args([normal_form(parser, arg) for arg in argv])
    for number in (signal.SIGTERM, signal.SIGHUP):  # end the current run, too
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    more += [f"--max_steps={args.steps}"] if args.steps is not None else []
    with tempfile.TemporaryDirectory(prefix="steady-compare-") as folder:
        arms = {name: open_arm(text.strip(), more, Path(folder, name), args.reuse)
                for name, text in (("A", args.A), ("B", args.B))}
        if arms["A"].evaluated != arms["B"].evaluated:
            raise ConfigError("A and B evaluate different samples; give both the same --val_data, "
                              "--seq_len, --data_mode, and --eval_steps x --batch_size")
        seeds = range(args.seed, args.seed + args.seeds)
        found = decide(arms, seeds, sys.stderr if args.json else sys.stdout)
    for name in ("difference", "step_ms_ratio", "memory_ratio"):
        if found[name] is not None and not args.json:
            low, high = found[f"{name}_interval"]
            print(f"{name:13} {found[name]:.4f} ({low:.4f} to {high:.4f})")
    print(json.dumps(found) if args.json else f"verdict       {found['verdict']}")
    note(found)  # last: the disk may be full
    return {"B": 0, "A": 3, None: 4}[found["better"]]


def decide(arms: dict[str, Arm], seeds: range, screen) -> dict:
    """Train a pair of each seed until it is clear; returns the row of the ledger. Raises Failed."""
    mine, pairs, losses = dict(begun=int(np.random.default_rng().integers(2**62))), [], []
    note(mine)  # it counts even if it never ends; the file orders simultaneous ones
    number = 1 + [row for row in objects(LEDGER) if "begun" in row].index(mine)
    level = level_of(number)
    for seed in seeds:
        order = "AB" if seed % 2 else "BA"  # a drift of the machine affects both
        pairs.append({name: result_of(name, arms[name], seed) for name in order})
        a, b = (pairs[-1][name]["loss"] for name in "AB")
        losses.append((a, b))
        print(f"seed {seed}: A {a:.4f}, B {b:.4f}, B - A {b - a:+.4f}", file=screen, flush=True)
        if len(losses) in LOOKS and (verdict(losses, level)[1] or all(a == b for a, b in losses)):
            break
    (mean, half), (text, better) = difference(losses, level), verdict(losses, level)
    found = {name: arm.title for name, arm in arms.items()} | dict(
        verdict=f"{text} ({len(pairs)} pairs)", better=better, comparison=number, level=level,
        difference=mean, difference_interval=[mean - half, mean + half], pairs=pairs,
        flags=[arms[arm].flags for arm in arms], compared=[pairs[0][arm]["name"] for arm in arms])
    for name in ("step_ms", "memory"):
        found[f"{name}_ratio"], found[f"{name}_ratio_interval"] = ratio(pairs, name, level)
    return found


def ratio(pairs: list[dict], name: str, level: float) -> tuple[float | None, list[float]]:
    """(geometric mean of B / A, the ends of its interval); (None, []) of unknown values."""
    if not all(pair[arm][name] for pair in pairs for arm in "AB"):
        return None, []
    mean, half = interval([math.log(p["B"][name] / p["A"][name]) for p in pairs], level)
    return math.exp(mean), [math.exp(mean - half), math.exp(min(700.0, mean + half))]
