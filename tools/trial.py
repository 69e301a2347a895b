"""python monitor.py try RUN: the gain of other options, measured in short runs.

A run of STEPS steps with the config.yaml of RUN, and such runs with a single option changed, take
turns, ROUNDS times. The gain is the median difference in ms/step; it is clear if all have one sign.
"""

import contextlib
import gc
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import config
import train
from config import Config
from steady.models import device as devices
from steady.options import ConfigError, Parser, read_flags, write_yaml
from steady.watch.findings import Finding
from steady.watch.history import History, read_rows
from steady.watch.proc import usable_cores
from steady.watch.report import report

STEPS, ROUNDS = 8, 5
SHORT = dict(max_steps=STEPS, max_minutes=None, warmup_steps=0, stage=[], log_interval=1,
             eval_interval=0, patience=0, sample_interval=0, save_interval=0, tensorboard=False,
             tracker="none", backup_to=None)


def open_run(run_dir: Path) -> tuple[Config, int]:
    """(options of a short run on one rank, its threads). Raises ConfigError."""
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir}: no such run, there is no metrics.jsonl in it")
    about = History(row for _, row in read_rows(run_dir / "metrics.jsonl")).about
    cfg = config.resolve(config.parse(["--config", str(run_dir / "config.yaml")]))
    ranks, micro_batch = int(about["ranks"]), int(about["micro_batch"])
    passes = -(-cfg.batch_size // (ranks * micro_batch))
    cfg = replace(cfg, **SHORT, batch_size=passes * micro_batch, micro_batch_size=micro_batch)
    return cfg, int(about["threads"])


def options(cfg: Config, threads: int) -> dict[str, tuple[Config, int]]:
    """{option: arguments of `measure` with it}."""
    device, larger = devices.pick_device(cfg.device, 0), 2 * cfg.micro_batch_size
    dtype = devices.pick_dtype(cfg.precision, device)
    attention = devices.attention_backend(cfg, device, dtype)
    changes = [("precision", "bf16" if dtype == torch.float32 else "fp32")]
    for name in ("flash", "efficient", "cudnn", "math"):
        devices.set_attention_backend(name)
        with contextlib.suppress(ConfigError):
            used = devices.attention_backend(replace(cfg, attention=name), device, dtype)
            changes += [("attention", name)] * (used != attention)
    changes += [("activation_checkpointing", "none")] * (cfg.activation_checkpointing != "none")
    changes += [("micro_batch_size", larger)] * (cfg.batch_size % larger == 0)
    out = {f"--{name} {value}": (replace(cfg, **{name: value}), threads) for name, value in changes}
    compiled = device.type == "cuda" if cfg.compile is None else cfg.compile
    out["--no_compile" if compiled else "--compile"] = replace(cfg, compile=not compiled), threads
    for n in {1, usable_cores()} - {threads} if device.type == "cpu" else ():
        out[f"OMP_NUM_THREADS={n}"] = cfg, n
    return out


def measure(cfg: Config, threads: int) -> float:
    """The median ms/step of a run with these options, in a temporary folder."""
    torch.set_num_threads(threads)
    torch.compiler.reset()
    gc.unfreeze()  # or the previous run stays in memory
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="steady-try-") as folder:
        write_yaml(cfg, f"{folder}/config.yaml", {})
        with contextlib.redirect_stdout(io.StringIO()):
            if code := train.main([f"--config={folder}/config.yaml", f"--out_dir={folder}/run"]):
                raise SystemExit(code)  # a signal ended it
        return report(Path(folder, "run"))["figures"]["step_ms_median"]


def tried(run_dir: Path) -> Finding:
    """The gain of each option in ms/step, the largest first."""
    cfg, threads = open_run(run_dir)
    others, parts, base = options(cfg, threads), [], []
    times = {name: [] for name in others}
    for _ in range(ROUNDS):
        base.append(measure(cfg, threads))
        for name in list(times):
            try:
                times[name].append(measure(*others[name]))
            except Exception as e:  # out of memory, no compiler
                parts.append(Finding("failed", values=dict(option=name, error=str(e)[:80])))
                del times[name]
    for name, ms in times.items():
        gains = np.subtract(base, ms)
        values = dict(option=name, low=float(gains.min()), high=float(gains.max()))
        clear = not values["low"] <= 0 <= values["high"]
        parts.append(Finding("option" if clear else "not clear", values=values,
                             ms=float(np.median(gains)) if clear else None))
    parts.sort(key=lambda part: -(part.ms or 0.0))
    return Finding("trial", of=float(np.median(base)), parts=tuple(parts))


def main(argv: list[str]):
    parser = Parser("monitor.py try", allow_abbrev=False, description="What would another option "
                    "gain? Measured in short runs with the configuration of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print the finding as JSON")
    args = read_flags(parser, argv)
    found = tried(args.run_dir)
    print(json.dumps(found.row()) if args.json else found)
