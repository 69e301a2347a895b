"""python monitor.py try RUN: the gain of other options, measured on the run's model.

Builds the model of the run's config.yaml with random weights and tokens, and leaves the run alone.
A step as it is and one with a single option changed take turns, nine each: forward and backward
passes, clipping, optimizer. The gain is the median of the differences. It is unclear if their
quartiles include 0, or if threads waited for a core over 10 % of the time.
"""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter as clock

import numpy as np
import torch

import config
from steady.models import device as devices
from steady.options import ConfigError, Parser, read_flags
from steady.ranks.parallel import Shards, compile_in_place
from steady.tokens.packing import trial_documents
from steady.watch import machine
from steady.watch.findings import Finding, finding
from steady.watch.history import History, read_rows
from steady.watch.proc import usable_cores
from steady.watch.slower import COMPUTE
from train import make_model, make_optimizers

TURNS, WARM_UP, QUARTILES, MOST_QUEUED = 9, 3, (0.25, 0.5, 0.75), 0.1
APART = 1.1  # times the model alone: runs of this repository reach 1.09, at 4 ms/step


class Trial:
    """A step of one rank with these options."""

    def __init__(self, cfg, micro_batch: int, per_rank: int, threads: int, fused: bool = False):
        self.cfg, self.passes, self.threads = cfg, -(-per_rank // micro_batch), threads
        self.device = device = devices.pick_device(cfg.device, 0)
        self.dtype = devices.pick_dtype(cfg.precision, device)
        self.autocast = torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)
        devices.set_attention_backend(cfg.attention)
        self.attention = devices.attention_backend(cfg, device, self.dtype)
        self.model = make_model(cfg, None, None, device, self.dtype, Shards())
        self.optimizers = make_optimizers(self.model, cfg, device)
        self.not_fused = [group for optimizer in self.optimizers
                          for group in optimizer.param_groups if not group.get("fused", True)]
        for group in self.not_fused if fused else ():
            group["fused"], group["foreach"] = True, None
        self.compiled = device.type == "cuda" if cfg.compile is None else cfg.compile
        if self.compiled:
            compile_in_place(self.model, self.optimizers, False, 1)
        self.tokens = torch.randint(cfg.vocab_size, (micro_batch, cfg.seq_len), device=device)
        varlen, packed = self.attention == devices.VARLEN, cfg.data_mode == "packed"
        self.documents = trial_documents(self.tokens, varlen) if packed else None

    def turn(self) -> tuple[float, float]:
        """(ms of a step, the share of it with a thread waiting for a core)."""
        if torch.get_num_threads() != self.threads:  # setting it empties caches
            torch.set_num_threads(self.threads)
            self.turn()
        devices.set_attention_backend(self.cfg.attention)
        before, times = machine.threads(), [self.now()]
        for _ in range(min(2, self.passes)):  # the second stands for all later ones
            with self.autocast:
                losses = self.model(self.tokens, self.tokens, self.documents)
            losses.mean().backward()
            times.append(self.now())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip or torch.inf)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        times.append(self.now())
        queued = machine.busiest(before, machine.threads(), 1).get("perf/cpu_queue_ms", 0.0)
        *passes, update = (1e3 * np.diff(times)).tolist()
        ms = passes[0] + (self.passes - 1) * passes[-1] + update
        return ms, queued / max(1e-9, sum(passes) + update)

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return clock()


def open_run(run_dir: Path) -> tuple[dict, list[dict]]:
    """(arguments of its Trial, its logs). Raises ConfigError."""
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir}: no such run, there is no metrics.jsonl in it")
    cfg = config.resolve(config.parse(["--config", str(run_dir / "config.yaml")]))
    history = History(row for _, row in read_rows(run_dir / "metrics.jsonl"))
    logs = [row for row in history.rows if "perf/forward_ms" in row and "perf/startup_s" not in row]
    about = {name: int(x) for name, x in history.about.items()}
    if not logs or "micro_batch" not in about or cfg.model == "transformers":
        raise ConfigError(f"{run_dir}: expected a run of this version and of steady's own "
                          "Transformer, with logs after its first step and --monitor light")
    devices.configure(replace(cfg, compile=True), devices.pick_device(cfg.device, 0))
    return dict(cfg=replace(cfg, init_from=None), micro_batch=about["micro_batch"],
                per_rank=-(-cfg.batch_size // about["ranks"]), threads=about["threads"]), logs


def options(now: dict, base: Trial) -> dict[str, dict]:
    """{option: arguments of a Trial with it}."""
    cfg, larger = now["cfg"], 2 * now["micro_batch"]
    changes = [("precision", "bf16" if base.dtype == torch.float32 else "fp32")]
    scores = now["micro_batch"] * cfg.n_layer * cfg.n_head * cfg.seq_len**2
    for name in ("flash", "efficient", "cudnn", "math")[: 4 if scores < 2**28 else 3]:
        devices.set_attention_backend(name)
        with contextlib.suppress(ConfigError):
            used = devices.attention_backend(replace(cfg, attention=name), base.device, base.dtype)
            changes += [("attention", name)] * (used != base.attention)
    if cfg.activation_checkpointing != "none":
        changes.append(("activation_checkpointing", "none"))
    out = {f"--{name} {value}": dict(cfg=replace(cfg, **{name: value})) for name, value in changes}
    if now["per_rank"] % larger == 0:
        out[f"--micro_batch_size {larger}"] = dict(micro_batch=larger)
    if base.not_fused:
        out["fused=True in make_optimizers"] = dict(fused=True)
    for n in {1, usable_cores()} - {now["threads"]} if base.device.type == "cpu" else ():
        out[f"OMP_NUM_THREADS={n}"] = dict(threads=n)
    compiled = "--no_compile" if base.compiled else "--compile"
    out[compiled] = dict(cfg=replace(cfg, compile=not base.compiled))
    return {name: now | changed for name, changed in out.items()}


def judge(option: str, base: Trial, other: Trial) -> Finding:
    """The gain of the option of `other`, in ms/step."""
    pairs = []
    for i in range(WARM_UP + TURNS):
        way = (-1) ** i  # they take turns at being first
        pairs.append([trial.turn() for trial in (base, other)[::way]][::way])
    pairs = np.array(pairs[WARM_UP:])  # [turns, of the two, (ms, share)]
    low, gain, high = np.quantile(pairs[:, 0, 0] - pairs[:, 1, 0], QUARTILES).tolist()
    values = dict(option=option, low=low, high=high, queued=float(pairs[..., 1].mean()))
    if values["queued"] > MOST_QUEUED:
        return finding("queued", values=values)
    return finding("not clear", values=values) if low <= 0 <= high else finding(
        "option", values=values, ms=gain)


def tried(run_dir: Path) -> Finding:
    now, logs = open_run(run_dir)
    base, parts = Trial(**now), []
    turns = np.array([base.turn() for _ in range(WARM_UP + TURNS)][WARM_UP:])
    for option, arguments in options(now, base).items():
        try:
            parts.append(judge(option, base, Trial(**arguments)))
        except Exception as e:  # out of memory, no compiler
            parts.append(finding("failed", values=dict(option=option, error=str(e)[:80])))
    own = [sum(row.get(f"perf/{name}_ms", 0.0) for name in COMPUTE) for row in logs]
    (low, ours, _), alone = (np.quantile(ms, QUARTILES).tolist() for ms in (own, turns[:, 0]))
    waits = [row["perf/cpu_queue_ms"] / row["perf/step_ms"] for row in logs
             if "perf/cpu_queue_ms" in row]
    clear = (max(turns[:, 1].mean(), np.median(waits or 0.0)) <= MOST_QUEUED
             and now["cfg"].data_mode != "documents")  # their rows are shorter
    step = float(np.median([row["perf/step_ms"] for row in logs]))
    added = ours - alone[1] if clear and low > APART * alone[2] else None
    values = dict(own_ms=ours, alone_ms=alone[1], added_ms=added)
    parts.sort(key=lambda part: -(part.ms or 0.0))
    return finding("trial", logs[-1]["step"], values, of=step, parts=tuple(parts))


def main(argv: list[str]) -> int:
    parser = Parser("monitor.py try", allow_abbrev=False, description="What would another option "
                    "gain? Measured on the run's model, with random tokens.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print the finding as JSON")
    args = read_flags(parser, argv)
    with contextlib.redirect_stdout(sys.stderr):
        found = tried(args.run_dir)
    print(json.dumps(found.row()) if args.json else found)
    return 0
