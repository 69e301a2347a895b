"""What a run tells about itself: time by phase, throughput, memory; the log line and the files.

The monitor receives numbers and never reaches into training. An ordinary step costs a few clock
reads; tensors given to it stay on their device until the next log, where all of them leave it in
one copy. `monitor.log(name, value_or_tensor)` from anywhere in the loop adds a metric.

Another sink is a method beside `write_tensorboard`; another device is a line in PEAK_TFLOPS.
"""

import argparse
import contextlib
import dataclasses
import gc
import heapq
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from config import Config, retry

# Dense peak TFLOP/s of (bf16 and fp16, fp32), by the exact name that torch reports: a substring
# would take an "RTX A1000" for an A100. From the vendors' data sheets, without sparsity; the
# fp32 column is without TF32, as torch multiplies by default.
PEAK_TFLOPS = {
    "NVIDIA B200": (2250, 75),
    "NVIDIA H200": (989, 67),
    "NVIDIA H100 80GB HBM3": (989, 67),
    "NVIDIA H100 PCIe": (756, 51),
    "NVIDIA H100 NVL": (835, 60),
    "NVIDIA GH200 480GB": (989, 67),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 19.5),
    "NVIDIA A100-PCIE-40GB": (312, 19.5),
    "NVIDIA L40S": (362, 91.6),
    "NVIDIA L4": (121, 30.3),
    "NVIDIA A10G": (70, 35),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 3090": (71, 35.6),
    "Tesla V100-SXM2-16GB": (125, 15.7),
    "Tesla V100-SXM2-32GB": (125, 15.7),
    "Tesla T4": (65, 8.1),
}

STEP_PHASES = ("data", "forward", "backward", "waiting", "optimizer", "other")
OWN_PHASES = tuple(name for name in STEP_PHASES if name != "waiting")  # for other ranks
OUTSIDE_PHASES = ("logging", "evaluation", "checkpoint")  # between steps, not part of any
PHASES = STEP_PHASES + OUTSIDE_PHASES
COUNTERS = ("perf/compilations", "perf/slowest_rank", "perf/slowest_rank_phase")

LINE = {  # what the log line shows besides step, loss and rate; "+": only with --verbose
    "train/grad_norm": "grad {:.2f}",
    "perf/step_ms": "{:.1f} ms",
    "perf/tokens_per_second": "{si} tok/s",
    "perf/mfu": "mfu {:.1%}",
    "perf/data_fraction": "data {:.1%}",
    "perf/padding_fraction": "padding {:.1%}",
    "memory/peak_gb": "mem {:.1f} GB",
    "memory/host_rss_gb": "rss {:.2f} GB",
    "health/update_ratio": "update {:.1e}",
    "health/output_entropy": "entropy {:.2f}",
    **{f"perf/{name}_ms": f"+{name} {{:.1f}}" for name in PHASES},
    "health/param_norm": "+weights {:.1f}",
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device for products of this type; None where it is not known."""
    if device.type != "cuda":
        return None
    peaks = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    if peaks is None:
        return None
    return peaks[dtype == torch.float32] * 1e12


class Monitor:
    """Times phases, gathers metrics, writes them every `cfg.log_interval` steps.

    flops_per_token, peak: FLOPs of training on one token; FLOP/s of all devices together, or None.
    out_dir, tensorboard_dir: where rows are written; None on ranks that write nothing.
    gather: [n] tensor → [ranks, n], the same on every rank; called on all of them at each log.
    autopsy: (step, rank) → what to add to the row of an anomaly: its samples, the first bad layer.
    """

    def __init__(
        self, cfg: Config, *, start_step: int, flops_per_token: int, peak: float | None,
        device: torch.device, out_dir: Path | None, tensorboard_dir: Path | None = None,
        start_tokens: int = 0,
        gather=lambda values: values[None], autopsy=lambda step, rank: {},
    ):  # fmt: skip
        self.cfg, self.device, self.gather, self.autopsy = cfg, device, gather, autopsy
        self.flops_per_token, self.peak = flops_per_token, peak
        self.out_dir, self.tensorboard_dir = out_dir, tensorboard_dir
        self.first_step = start_step + 1
        self.tensorboard = None  # opened at the first row: importing it costs 0.2 s
        self.metrics_file = None
        self.before = {}  # goodput of the processes that this one continues, in seconds
        self.watch = Watch()
        if out_dir:
            self.metrics_file, rows = open_metrics(out_dir / "metrics.jsonl", start_step)
            self.before = seconds_before(*rows)
            for row in rows[0]:
                self.watch.add(row)
        self.tokens = self.logged_tokens = start_tokens
        self.logged_step, self.padded_tokens = start_step, 0
        self.gathered = {}  # name → [total, weight] since the last log, on the device
        self.losses, self.grad_norms = [], []  # of every step since the last log, on the device
        self.recent = {
            "loss": deque(maxlen=cfg.window_size),
            "gradient": deque(maxlen=cfg.window_size),
        }
        self.not_finite_since, self.not_finite_steps = None, 0
        self.nonfinite_in_a_row = 0  # steps up to the last log, the same on all ranks
        self.seconds = dict.fromkeys(PHASES, 0.0)  # since the last log
        self.total_seconds = dict.fromkeys(PHASES, 0.0)  # of this process, up to the last log
        self.startup_seconds = process_age_seconds()
        self.window_ms = deque(maxlen=cfg.window_size)  # of the newest steps since the last log
        self.slowest = [(0.0, 0)] * 5  # (ms, step), a heap
        self.outside_seconds = 0.0  # between the last step and this
        self.events = DeviceTimes() if device.type == "cuda" and cfg.monitor != "off" else None
        self.gc_seconds, self.gc_began, self.queued_seconds = 0.0, 0.0, cpu_queue_seconds()
        gc.callbacks.append(self.gc_ran)
        self.current, self.since = "other", time.perf_counter()
        self.step_began = self.since

    # --- what the loop calls ---

    def phase(self, name: str) -> str:
        """From now on time belongs to phase `name`; returns the phase that this ends."""
        if name in OUTSIDE_PHASES and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is still queued belongs to the steps
        now = time.perf_counter()
        ended = self.current
        self.seconds[ended] += now - self.since
        if ended in OUTSIDE_PHASES:
            self.outside_seconds += now - self.since
        self.current, self.since = name, now
        if self.events:
            self.events.mark(name)
        return ended

    def log(self, name: str, value, weight=1):
        """Add to the total of `name` over this log interval, and to what it will be divided by.

        So with a weight of 1 it is a mean, over steps and ranks. A tensor is not waited for.
        """
        if not self.cfg.log_interval:
            return
        value, weight = (x.detach() if isinstance(x, torch.Tensor) else x for x in (value, weight))
        if name in self.gathered:
            total = self.gathered[name]
            total[0], total[1] = total[0] + value, total[1] + weight
        else:
            self.gathered[name] = [value, weight]

    def log_all(self, values: dict):
        for name, value in values.items():
            self.log(name, value)

    def due(self, step: int, every: int | None = None) -> bool:
        """Whether something measured every so many steps (None: at each log) is, in this step."""
        every = self.cfg.log_interval if every is None else every
        return every > 0 and (step % every == 0 or step in (self.first_step, self.cfg.max_steps))

    @contextlib.contextmanager
    def health(self, step: int, named_parameters: list[tuple[str, torch.Tensor]]):
        """Around an optimizer step: norms and the size of the update, where they are due.

        The weights before the update are kept only until it is done.
        """
        if self.cfg.monitor != "full" or not self.due(step, self.cfg.health_interval):
            yield
            return
        names = [name for name, p in named_parameters if p.grad is not None]
        weights = [p.detach() for _, p in named_parameters if p.grad is not None]
        grads = [p.grad for _, p in named_parameters if p.grad is not None]
        for group, norm in group_norms(names, grads).items():
            self.log(f"health/grad_norm{group}", norm)
        before = [w.clone() for w in weights]
        sizes = group_norms(names, before)
        yield
        updates = group_norms(names, torch._foreach_sub(before, weights))
        for group, size in sizes.items():
            self.log(f"health/param_norm{group}", size)
            self.log(f"health/update_ratio{group}", updates[group] / size.clamp(min=1e-12))

    def step(self, step: int, learning_rate: float, loss, grad_norm=None, *, tokens: int,
             real_tokens: int | None = None):  # fmt: skip
        """Step number `step` is done: log if it is due. The first and the last always are.

        loss: of this rank's samples, grad_norm: of all ranks'; tensors, or numbers.
        tokens: in the batch of all ranks; real_tokens: without the padding.
        """
        now = time.perf_counter()
        ms = (now - self.step_began - self.outside_seconds) * 1e3
        self.step_began, self.outside_seconds = now, 0.0
        self.window_ms.append(ms)
        heapq.heappushpop(self.slowest, (ms, step))
        self.padded_tokens += tokens
        self.tokens += tokens if real_tokens is None else real_tokens
        if not self.cfg.log_interval:
            return
        self.losses.append(loss)
        if grad_norm is not None:
            self.grad_norms.append(grad_norm)
        if self.events:
            self.events.end()
        if self.due(step):
            row = self.gather_values(step)  # waits for the device and for other ranks
            row |= self.clocks(step, learning_rate)  # that wait is part of the step
            previous = self.phase("logging")
            self.write_row(step, row)
            self.phase(previous)
        if self.events and step % max(1, self.cfg.log_interval // 8) == 0:
            self.events.begin(self.current)

    # --- what becomes of it ---

    def gather_values(self, step: int) -> dict[str, float]:
        """What was logged, over steps and ranks: one copy from the device for all of it."""
        names = sorted(self.gathered)  # in the same order on every rank
        logged = [[value] for i in (0, 1) for value in (self.gathered[name][i] for name in names)]
        n = len(self.losses)
        parts = [*logged, self.losses, self.grad_norms, self.own_ms(step)]
        values = torch.cat([self.on_device(part) for part in parts if part])
        previous = self.phase("waiting") if dist.is_initialized() else None
        table = np.array(self.gather(values).tolist())  # [ranks, values]
        if previous:
            self.phase(previous)
        totals, weights, losses, norms, own = np.split(
            table, np.cumsum([len(names), len(names), n, len(self.grad_norms)]), axis=1
        )
        self.gathered, self.losses, self.grad_norms = {}, [], []
        sums = zip(names, totals.sum(0).tolist(), weights.sum(0).tolist(), strict=True)
        row = {name: total / weight for name, total, weight in sums if weight}
        row["train/loss"] = float(losses.mean())
        if norms.size and self.cfg.monitor != "off":
            row["train/grad_norm"] = float(norms[0].mean())
        bad = ~np.isfinite(losses).all(0) | ~np.isfinite(norms).all(0)
        good = np.flatnonzero(~bad)
        before = 0 if len(good) else self.nonfinite_in_a_row
        self.nonfinite_in_a_row = before + len(bad) - (good[-1] + 1 if len(good) else 0)
        if self.cfg.monitor != "off":
            row["health/nonfinite_steps"] = int(bad.sum())
            self.look_for_anomalies(step, losses, norms[0], bad)
        if len(table) > 1:
            busy = own.sum(1)
            slow = int(busy.argmax())
            typical = np.median(np.delete(own, slow, 0), axis=0)
            row["perf/slowest_rank"] = slow
            row["perf/slowest_rank_ratio"] = busy[slow] / max(1e-9, typical.sum())
            row["perf/slowest_rank_phase"] = int((own[slow] - typical).argmax())
        return row

    def on_device(self, values: list) -> torch.Tensor:
        """A list of numbers, or one of tensors of a single element, as [n] in fp32."""
        if isinstance(values[0], torch.Tensor):
            values = torch.stack(values).detach().reshape(-1)
            return values.to(self.device, torch.float32, non_blocking=True)
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def own_ms(self, step: int) -> list[float]:
        """ms a step of this rank's own work by phase, which waiting for other ranks is not."""
        self.phase(self.current)
        if self.events:
            mean = self.events.means()
            return [mean.get(name, 0.0) for name in OWN_PHASES]
        return [self.seconds[name] / (step - self.logged_step) * 1e3 for name in OWN_PHASES]

    def clocks(self, step: int, learning_rate: float) -> dict[str, float]:
        """What the clocks say about the steps since the last log; starts anew."""
        self.phase(self.current)
        steps = step - self.logged_step
        tokens, real_tokens = self.padded_tokens / steps, (self.tokens - self.logged_tokens) / steps
        ms = {name: seconds / steps * 1e3 for name, seconds in self.seconds.items()}
        step_ms = sum(ms[name] for name in STEP_PHASES)
        flops = tokens * self.flops_per_token / step_ms * 1e3
        row = {
            "train/learning_rate": learning_rate,
            "train/tokens": self.tokens,
            "perf/step_ms": step_ms,
            "perf/tokens_per_second": tokens / step_ms * 1e3,
            "perf/tflops": flops / 1e12,
        }
        if self.peak:
            row["perf/mfu"] = flops / self.peak
        if self.logged_step == self.first_step - 1:
            # the first step of a process compiles, allocates and fills caches
            row["perf/startup_s"] = self.startup_seconds = self.startup_seconds + step_ms / 1e3
            self.seconds |= dict.fromkeys(STEP_PHASES, 0.0)
        window = list(self.window_ms)
        self.window_ms.clear()
        self.settle()
        self.logged_step, self.logged_tokens = step, self.tokens
        if real_tokens != tokens:
            row["perf/real_tokens_per_second"] = real_tokens / step_ms * 1e3
            row["perf/padding_fraction"] = 1 - real_tokens / tokens
        self.padded_tokens = 0
        if self.cfg.monitor == "off":
            return row
        row |= {f"perf/{name}_ms": ms[name] for name in OUTSIDE_PHASES}
        if self.events:  # a host clock does not see where a GPU spends its time
            ms |= dict.fromkeys(STEP_PHASES, 0.0) | self.events.means()
            window = self.events.take_steps()
        if window:
            row["perf/step_ms_median"] = quantile(window, 0.5)
            row["perf/step_ms_p95"] = quantile(window, 0.95)
        whole = sum(ms[name] for name in STEP_PHASES) or 1.0
        row |= {f"perf/{name}_ms": ms[name] for name in STEP_PHASES
                if name != "waiting" or dist.is_initialized()}  # fmt: skip
        compute = ms["forward"] + ms["backward"] + ms["optimizer"]
        row["perf/compute_fraction"] = compute / whole
        row["perf/data_fraction"] = ms["data"] / whole
        queued = cpu_queue_seconds()
        row["perf/cpu_queue_ms"] = (queued - self.queued_seconds) / steps * 1e3
        row["perf/gc_ms"] = self.gc_seconds / steps * 1e3
        self.queued_seconds, self.gc_seconds = queued, 0.0
        if "torch._dynamo.utils" in sys.modules:
            graphs = sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]
            row["perf/compilations"] = graphs
        if self.due(step, self.cfg.memory_interval):
            row |= memory(self.device)
        if retry.count:
            row["health/retries"] = retry.count
        return row | self.goodput()

    def look_for_anomalies(self, step: int, losses, norms, bad):
        """Rows and warnings for spikes and for what is not finite.

        losses: [ranks, steps] since the last log; norms, bad: [steps] or, without norms, [0].
        """
        steps = np.arange(step - losses.shape[1] + 1, step + 1)
        worst = np.nan_to_num(losses, nan=np.inf, neginf=np.inf)
        ranks = worst.argmax(0)
        found = {}  # kind → [(value, normal, step, rank)]
        for i in np.flatnonzero(bad):
            value = losses[ranks[i], i] if np.isinf(worst[ranks[i], i]) else norms[i]
            found.setdefault("not finite", []).append((float(value), 0.0, steps[i], ranks[i]))
        for kind, values, times in (("loss", worst.max(0), 1.2), ("gradient", norms, 3.0)):
            if not len(values):
                continue
            recent = self.recent[kind]
            if len(recent) >= 20:
                median = quantile(recent, 0.5)
                spread = 1.4826 * quantile([abs(v - median) for v in recent], 0.5)
                high = ~bad & (values > max(times * median, median + 10 * spread))
                for i in np.flatnonzero(high):
                    item = (float(values[i]), median, steps[i], ranks[i])
                    found.setdefault(f"{kind} spike", []).append(item)
            recent.extend(values[~bad].tolist())
        if "not finite" in found:
            self.not_finite_steps += len(found["not finite"])
        elif self.not_finite_since is not None:
            self.say(step, f"finite again; {self.not_finite_steps} steps from step "
                           f"{self.not_finite_since} on were not, and were skipped")  # fmt: skip
            self.not_finite_since, self.not_finite_steps = None, 0
        if not self.out_dir:
            return
        for kind, items in found.items():
            value, median, at, rank = items[0] if kind == "not finite" else max(items)
            at, rank = int(at), int(rank)
            row = dict(anomaly=kind, value=value, median=median, steps=len(items), rank=rank)
            row |= self.autopsy(at, rank)
            self.write(at, row)
            if kind == "not finite":
                text = "not finite: loss or gradient, the update was skipped"
                if self.not_finite_since is not None:
                    continue  # said already
                self.not_finite_since = at
            else:
                text = f"{kind}: {value:.4g}, the median is {median:.4g}"
            if "positions" in row:
                text += f"; rank {rank}, samples {row['positions'][0]} to {row['positions'][1] - 1}"
            if row.get("first_bad_layer"):
                text += f"; first layer whose output is not finite: {row['first_bad_layer']}"
            self.say(at, f"{text}; see python data.py show {self.out_dir} {at}")

    def say(self, step: int, text: str):
        if self.out_dir:
            print(f"warning: step {step}: {text}", flush=True)

    def gc_ran(self, when: str, info: dict):
        if when == "start":
            self.gc_began = time.perf_counter()
        else:
            self.gc_seconds += time.perf_counter() - self.gc_began

    def settle(self):
        """Move the seconds since the last log to those of the whole process."""
        for name in PHASES:
            self.total_seconds[name] += self.seconds[name]
            self.seconds[name] = 0.0

    def goodput(self) -> dict[str, float]:
        """Shares of the wall time since the run began, over all processes that continued it.

        "lost" is the time of steps that were made, but after the checkpoint that was resumed from.
        """
        total, before = self.total_seconds, self.before
        seconds = {name: total[name] for name in OUTSIDE_PHASES} | {"data": total["data"]}
        seconds["training"] = sum(total[name] for name in STEP_PHASES if name != "data")
        seconds["startup"] = self.startup_seconds
        seconds = {name: s + before.get(name, 0.0) for name, s in seconds.items()}
        seconds["lost"] = before.get("lost", 0.0)
        wall = sum(seconds.values())
        shares = {f"goodput/{name}": s / wall for name, s in seconds.items()}
        return shares | {"goodput/wall_s": wall}

    def write_row(self, step: int, row: dict[str, float]):
        """To the screen, with a warning where steps have become slower, and to the files."""
        if self.out_dir:
            print(self.line(step, row), flush=True)
        self.write(step, row)
        for event in self.watch.add({"step": step, **row}) if self.out_dir else ():
            self.say(step, describe_event(event))
            self.write_text("slow-downs", describe_event(event), step)

    def write(self, step: int, row: dict):
        """To the files. One that cannot be written is given up with a warning; training goes on."""
        try:
            if self.metrics_file:
                self.write_metrics(step, row)
        except OSError as e:
            self.give_up("metrics.jsonl", e)
            self.metrics_file = None
        self.to_tensorboard(self.write_tensorboard, step, row)

    def write_text(self, tag: str, text: str, step: int):
        self.to_tensorboard(lambda: self.tensorboard and self.tensorboard.add_text(tag, text, step))

    def to_tensorboard(self, write, *args):
        try:
            if self.tensorboard_dir:
                write(*args)
        except Exception as e:  # its writer thread passes on whatever it met
            self.give_up("TensorBoard", e)
            self.tensorboard_dir = self.tensorboard = None

    def give_up(self, sink: str, error: Exception):
        print(f"warning: no more {sink}, training goes on: {error}", file=sys.stderr, flush=True)

    def write_metrics(self, step: int, row: dict):
        # JSON has no NaN or infinity; they are written as null
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v
               for k, v in row.items()}  # fmt: skip
        self.metrics_file.write(json.dumps({"step": step, **row}) + "\n")
        self.metrics_file.flush()

    def write_tensorboard(self, step: int, row: dict):
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))} | stacked(row)
        if not numbers:
            return
        if self.tensorboard is None:
            self.tensorboard = open_tensorboard(self.tensorboard_dir, self.first_step, self.cfg)
        from tensorboard.compat.proto.summary_pb2 import Summary

        # all of them in one event: add_scalar for each takes three times as long on this thread
        values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
        self.tensorboard.file_writer.add_summary(Summary(value=values), step)

    def line(self, step: int, row: dict[str, float]) -> str:
        left = (self.cfg.max_steps - step) * row["perf/step_ms"] / 1e3
        parts = [
            f"step {step:{len(str(self.cfg.max_steps))}d}/{self.cfg.max_steps}",
            f"loss {row['train/loss']:.4f}",
            f"lr {row['train/learning_rate']:.2e}",
        ]
        for name, form in LINE.items():
            if name in row and (self.cfg.verbose or form[0] != "+"):
                value = si(row[name]) if "{si}" in form else row[name]
                parts.append(form.lstrip("+").replace("{si}", "{}").format(value))
        return " | ".join([*parts, f"left {duration(left)}"])

    def close(self) -> str:
        """Write what is left; returns the report of the run, which TensorBoard shows as well."""
        gc.callbacks.remove(self.gc_ran)
        self.phase(self.current)
        self.settle()
        text = ""
        if self.out_dir:
            slowest = [[step, round(ms, 3)] for ms, step in sorted(self.slowest)[::-1] if step]
            slowest = {} if self.device.type == "cuda" else {"slowest": slowest}
            # what came after the last log is in no other row
            self.write(self.logged_step, {"end": self.goodput(), **slowest})
            text = report_text(report(self.out_dir))
            self.write_text("diagnosis", f"```\n{text}\n```", self.logged_step)
        self.to_tensorboard(lambda: self.tensorboard and self.tensorboard.close())
        if self.cfg.wandb and "wandb" in sys.modules:
            sys.modules["wandb"].finish()
        try:
            if self.metrics_file:
                self.metrics_file.close()
        except OSError as e:
            self.give_up("metrics.jsonl", e)
        return text


class DeviceTimes:
    """Time by phase on a GPU: events in its own queue, on sampled steps, read when they are done.

    Nothing waits for them. The pool is made once; a step that finds it in use is not sampled.
    """

    def __init__(self, make_event=lambda: torch.cuda.Event(enable_timing=True), size: int = 2048):
        self.make_event, self.size, self.free, self.made = make_event, size, [], 0
        self.open = None  # [(phase, event at its begin)] of the step that is sampled now
        self.done = deque()  # such lists, closed by a last event
        self.steps = []  # {phase: ms} of the steps that were read, until they are taken

    def event(self):
        if not self.free and self.made < self.size:
            self.free, self.made = [self.make_event() for _ in range(64)], self.made + 64
        if not self.free:
            return None
        event = self.free.pop()
        event.record()
        return event

    def begin(self, phase: str):
        event = self.event()
        self.open = [(phase, event)] if event else None

    def mark(self, phase: str):
        if self.open is None:
            return
        event = self.event()
        if phase in OUTSIDE_PHASES or event is None:  # not a plain step: do not sample it
            self.free += [e for _, e in self.open] + [event] * (event is not None)
            self.open = None
        else:
            self.open.append((phase, event))

    def end(self):
        if self.open:
            self.mark("end")
        if self.open:
            self.done.append(self.open)
        self.open = None

    def means(self) -> dict[str, float]:
        """Mean ms by phase of the sampled steps since they were last taken."""
        while self.done and self.done[0][-1][1].query():
            marks, ms = self.done.popleft(), {}
            for (phase, event), (_, following) in itertools.pairwise(marks):
                ms[phase] = ms.get(phase, 0.0) + event.elapsed_time(following)
            self.free += [event for _, event in marks]
            self.steps.append(ms)
        names = {name for ms in self.steps for name in ms}
        return {name: sum(ms.get(name, 0.0) for ms in self.steps) / len(self.steps)
                for name in names}  # fmt: skip

    def take_steps(self) -> list[float]:
        taken, self.steps = self.steps, []
        return [sum(ms.values()) for ms in taken]


def group_norms(names: list[str], tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Norms over all tensors ("") and over those of each layer ("/blocks.0"), on the device."""
    groups = {}
    for i, name in enumerate(names):
        layer = re.match(r"(.*?\.\d+)\.|[^.]*", name)
        groups.setdefault("/" + (layer[1] or layer[0]), []).append(i)
    norms = torch.stack(torch._foreach_norm(tensors)).float()
    return {"": norms.norm()} | {group: norms[i].norm() for group, i in groups.items()}


# --- slow-downs ------------------------------------------------------------------------------


class Level:
    """Finds when the values of log intervals rise above what they were: a one-sided CUSUM.

    Page 1954, with a reference of 2.5 % (half the smallest rise to find) or one standard deviation,
    whichever is more, and a bound on what one value can add, so that it takes six to be believed.
    Values that are in control teach what is normal, up to 50 of them; after a rise the new level is
    learned in the same way, and the old one is kept to see the rise end.
    """

    def __init__(self, least: int = 10):
        self.least = least  # values that are needed to know what is normal
        self.normal, self.rising = [], []  # [(value, row)]
        self.sum, self.since, self.last = 0.0, 0, deque(maxlen=5)
        self.lower = deque(maxlen=10)  # (normal, event) of the levels below this one
        self.mean = 0.0

    def learn(self, unit: float | None):
        values = np.array([value for value, _ in self.normal])
        # from differences, which a creep does not widen; 0.954 = 0.6745 sqrt(2)
        sigma = float(np.median(np.abs(np.diff(values)))) / 0.954
        self.mean = float(np.minimum(values, np.median(values) + 5 * sigma).mean())
        self.unit = unit or self.mean
        self.slack = max(0.025, sigma / self.unit)
        self.limit = max(0.1, 8 * sigma / self.unit)

    def add(self, step: int, value: float, row: dict, unit: float | None = None):
        """("begins", before, after) where a rise is found, ("ends", event), or None."""
        self.last.append(value)
        if self.lower and len(self.last) == 5:
            normal, event = self.lower[-1]
            if np.median(self.last) < 0.7 * event["before"] + 0.3 * event["after"]:
                self.lower.pop()
                self.normal, self.rising, self.sum = normal, [], 0.0
                self.learn(unit)
                return "ends", event
        if len(self.normal) < self.least:
            self.normal.append((value, row))
            self.since = step
            if len(self.normal) == self.least:
                self.learn(unit)
            return None
        over = (value - self.mean) / self.unit - self.slack
        self.sum += min(over, self.limit / 6)
        if self.sum <= 0:
            if len(self.normal) < 50:  # with those that rose and fell again: else it would be low
                self.normal += [*self.rising, (value, row)]
                self.learn(unit)
            self.sum, self.since, self.rising = 0.0, step, []
            return None
        self.rising = [*self.rising[-99:], (value, row)]
        if self.sum < self.limit:
            return None
        return "begins", self.normal, self.rising

    def risen(self, event: dict):
        self.lower.append((self.normal, event))
        self.normal, self.rising, self.sum = [], [], 0.0


class Watch:
    """Finds from the rows of metrics.jsonl since when steps are slower, by how much, and why."""

    MIN_STEPS = 20  # rows of fewer steps are put together: one of a few steps is mostly noise

    def __init__(self):
        self.levels = {name: Level() for name in ("median", "work", *OUTSIDE_PHASES)}
        self.levels["mean"] = Level(20)  # steps that take long now and then make it uneven
        self.block, self.step, self.seen = [], 0, {}
        self.tflop = None  # TFLOP a step when the run began
        self.active = {}  # kind → the newest event that has not ended

    def add(self, row: dict) -> list[dict]:
        """The events that begin or end with this row."""
        if row.get("perf/step_ms") is None or "perf/step_ms_median" not in row:
            return []
        if "perf/startup_s" in row:  # the first step of a process
            self.block, self.step = [], row["step"]
            return []
        tflop = row["perf/tflops"] * row["perf/step_ms"]
        self.tflop = self.tflop or tflop
        self.block.append(row | {"work": tflop / self.tflop})
        steps = row["step"] - self.step
        if steps < self.MIN_STEPS:
            return []
        row = mean_row(self.block)
        self.block, self.step = [], row["step"]
        values = {"work": (row["work"], None)}
        for name, key in (("median", "perf/step_ms_median"), ("mean", "perf/step_ms")):
            values[name] = (row[key] / row["work"], None)
        unit = self.levels["mean"].mean or row["perf/step_ms"]
        for name in OUTSIDE_PHASES:
            total = row[f"perf/{name}_ms"] * steps
            if total > 0:  # its cost a step, since it was last done
                values[name] = (total / (self.step - self.seen.get(name, self.step - steps)), unit)
                self.seen[name] = self.step
        found = []
        for name, (value, unit) in values.items():
            kind = "step" if name in ("median", "mean") else name
            level = self.levels[name]
            told = level.add(self.step, value, row, unit)
            if told and told[0] == "begins":
                event = make_event(kind, level, *told[1:]) | {"series": name}
                level.risen(event)
                if self.active.get(kind, event)["series"] == name:  # else the other one has told
                    self.active[kind] = event
                    found.append(event)
            elif told and self.active.get(kind) is told[1]:
                found.append(dict(self.active.pop(kind), ended=self.step))
                if level.lower:  # it is back where an earlier rise had left it
                    self.active[kind] = level.lower[-1][1]
        return found


def mean_row(rows: list[dict]) -> dict[str, float]:
    """Means of what is measured; the newest of what only grows and of sizes in memory."""
    if len(rows) == 1:
        return dict(rows[0])
    newest, out = rows[-1], {}
    for name in newest:
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        measured = name == "work" or name.startswith("perf/") and name not in COUNTERS
        out[name] = sum(values) / len(values) if measured and values else newest[name]
    return out


def make_event(kind: str, level: Level, normal: list, rising: list) -> dict:
    """A rise: since when, from what to what, whether suddenly, and what accounts for it."""
    values = [value for value, _ in rising]
    now = float(np.median(values[-10:]))
    # of a jump most values are near the last ones, of a creep few
    near = np.array(values) > 0.3 * level.mean + 0.7 * np.median(values[-3:])
    before, after = ([row for _, row in rows] for rows in (normal[-20:], rising))
    event = dict(
        kind=kind, since=level.since + 1, found=rising[-1][1]["step"], before=level.mean, after=now,
        percent=100 * (now - level.mean) / level.unit, creeps=bool(near.mean() < 0.6),
    )  # fmt: skip
    return event | explain(event, before, after)


def explain(event: dict, before: list[dict], after: list[dict]) -> dict:
    """Which phases became longer, by how many ms a step, and what the signals beside them say."""
    old, new = mean_row(before), mean_row(after)

    def added(name: str) -> float:
        return (new.get(name) or 0.0) - (old.get(name) or 0.0)

    if event["kind"] == "work":
        return dict(phases=[], causes=["longer sequences or a larger batch: more work, not slower"])
    if event["kind"] in OUTSIDE_PHASES:
        cause, creeping = OUTSIDE_CAUSES[event["kind"]]
        phases = [(event["kind"], round(event["after"] - event["before"], 3))]
        return dict(phases=phases, causes=[creeping if event["creeps"] else cause])
    # what more work costs is not what is asked here
    phases = {name: new.get(f"perf/{name}_ms", 0.0) / new["work"] - old.get(f"perf/{name}_ms", 0.0)
              / old["work"] for name in STEP_PHASES}  # fmt: skip
    longer = {name: ms for name, ms in phases.items() if ms > 0}
    total = sum(longer.values()) or 1e-9
    shares = []  # (ms, cause)
    gc_ms = added("perf/gc_ms")
    if gc_ms > 0.05 * total:
        shares.append((gc_ms, "Python's garbage collector: call gc.freeze() after start-up, or "
                              "make fewer objects that refer to one another"))  # fmt: skip
        longer = {name: ms * max(0.0, 1 - gc_ms / total) for name, ms in longer.items()}
    compute = sum(ms for name, ms in longer.items() if name not in ("data", "waiting"))
    slow, ratio = new.get("perf/slowest_rank"), new.get("perf/slowest_rank_ratio", 1.0)
    if slow is not None and ratio > 1.1 and ratio > 1.05 * old.get("perf/slowest_rank_ratio", 1.0):
        votes = [(row["perf/slowest_rank"], row["perf/slowest_rank_phase"]) for row in after]
        slow, phase = max(set(votes), key=votes.count)
        shares.append((sum(longer.values()), f"rank {int(slow)} is slow, the others wait for it: "
                       f"its own work takes {ratio:.2f} times theirs, most of it in "
                       f"{OWN_PHASES[int(phase)]}"))  # fmt: skip
        longer, compute = {}, 0.0
    if longer.get("data", 0.0) > 0.05 * total:
        rss = "memory/workers_rss_gb"  # large from the start where the process they copy is
        grown = last(after, rss) - last(before, rss)
        shares.append((longer["data"], "a loader whose memory grows: what does it keep?"
                       if grown > 0.03 + 0.05 * last(before, rss)
                       else "the loop waits for data: more --num_workers, a faster "
                       "disk, or less work for each sample"))  # fmt: skip
    signal = None
    if last(after, "perf/compilations") > last(before, "perf/compilations"):
        signal = "recompilation: shapes or flags that change; look at TORCH_LOGS=recompiles"
    elif last(after, "memory/alloc_retries") > last(before, "memory/alloc_retries"):
        signal = ("the CUDA allocator is out of memory and tries again: a smaller "
                  "--micro_batch_size, or PYTORCH_ALLOC_CONF=expandable_segments:True")  # fmt: skip
    elif 0 < new.get("perf/clock_mhz", 0.0) < 0.97 * old.get("perf/clock_mhz", 0.0):
        signal = "lower clocks of the GPU: its temperature, its power limit"
    elif added("perf/cpu_queue_ms") > 0.1 * total:
        signal = "CPU contention: other processes run on these cores"
    elif longer.get("other", 0.0) > 0.5 * total and event["creeps"]:
        signal = "something in the loop that grows, as a list that is gone through each time"
    if signal and compute > 0.05 * total:
        shares.append((compute, signal))
    unexplained = total - sum(ms for ms, _ in shares)
    causes = [f"{cause} ({min(1, ms / total):.0%})" for ms, cause in sorted(shares)[::-1]]
    if unexplained > 0.05 * total:
        causes.append(f"unexplained ({unexplained / total:.0%})")
    ranked = sorted(((n, round(ms, 3)) for n, ms in phases.items()), key=lambda item: -item[1])
    return dict(phases=[item for item in ranked if item[1] > 0.05 * total], causes=causes)


def last(rows: list[dict], name: str) -> float:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), 0.0)


OUTSIDE_CAUSES = {  # suddenly, and growing
    "checkpoint": ("checkpoints, slower or more frequent: a faster disk, a larger --save_interval",
                   "what is written with each checkpoint grows, as a list that is rewritten"),
    "evaluation": ("evaluation: longer or more frequent; see --eval_steps and --eval_interval",
                   "evaluation takes longer each time"),
    "logging": ("a sink that blocks: metrics.jsonl or TensorBoard on a slow disk; try another "
                "--tensorboard_dir or a larger --log_interval", "logging takes longer each time"),
}  # fmt: skip


def describe_event(event: dict) -> str:
    at, what = event["since"], event["kind"]
    if event.get("ended") and what == "work":
        return f"a step has as much work again as before step {at}"
    if event.get("ended"):
        return f"{what} time is back to normal; it was slower from step {at} on"
    if what == "work":
        return f"a step has {event['percent']:+.0f}% work since step {at}: more work, not slower"
    how = "creeping up" if event["creeps"] else "slower"
    phases = ", ".join(f"{name} {ms:+.3g} ms" for name, ms in event["phases"])
    return (
        f"{what} {how} since about step {at}: {event['before']:.3g} -> {event['after']:.3g} ms "
        f"a step ({event['percent']:+.0f}%{'' if what == 'step' else ' of a step'}), {phases}. "
        f"Cause: {'; '.join(event['causes'])}"
    )


# --- the report ------------------------------------------------------------------------------


FIGURES = ("train/loss", "val/loss", "val/bits_per_byte", "perf/step_ms_p95", "perf/mfu",
           "perf/tokens_per_second", "memory/host_rss_gb", "memory/peak_gb")  # fmt: skip


def report(run_dir: Path) -> dict:
    """What there is to say about a run: seconds by phase, slow-downs, anomalies, figures.

    Raises OSError where there is no metrics.jsonl.
    """
    rows, watch = [row for _, row in read_rows(run_dir / "metrics.jsonl")], Watch()
    out = dict(run=str(run_dir), step=0, slowdowns=[], slowest=[], figures={})
    ms, medians, seconds = dict.fromkeys(STEP_PHASES, 0.0), [], seconds_so_far(rows)
    for row in rows:
        for event in watch.add(row):
            if "ended" in event:
                next(e for e in out["slowdowns"] if e["since"] == event["since"]
                     and e["kind"] == event["kind"])["ended"] = event["ended"]  # fmt: skip
            else:
                out["slowdowns"].append(dict(event))
        if row.get("perf/step_ms") and "perf/startup_s" not in row:
            for name in STEP_PHASES:
                ms[name] += (row["step"] - out["step"]) * (row.get(f"perf/{name}_ms") or 0.0)
            medians.append(row.get("perf/step_ms_median") or row["perf/step_ms"])
        out["step"], out["slowest"] = row["step"], row.get("slowest", out["slowest"])
        out["figures"] |= {name: row[name] for name in FIGURES if row.get(name) is not None}
    out["anomalies"] = [row for row in rows if "anomaly" in row]
    out["wall_s"] = sum(seconds.values())
    training, measured = seconds.get("training", 0.0), sum(ms.values()) - ms["data"]
    out["seconds"] = {"start-up": seconds.get("startup", 0.0), "data": seconds.get("data", 0.0)}
    out["seconds"] |= {name: ms[name] * training / (measured or 1.0) for name in STEP_PHASES[1:]}
    out["seconds"]["training"] = 0.0 if measured else training  # --monitor off: not by phase
    out["seconds"] |= {name: seconds.get(name, 0.0) for name in (*OUTSIDE_PHASES, "lost")}
    if medians:
        tenth = max(1, len(medians) // 10)
        out["figures"]["step_ms_median"] = float(np.median(medians))
        out["figures"]["first_tenth_ms"] = float(np.median(medians[:tenth]))
        out["figures"]["last_tenth_ms"] = float(np.median(medians[-tenth:]))
    padding = [row["perf/padding_fraction"] for row in rows if "perf/padding_fraction" in row]
    if padding:
        out["figures"]["padding_fraction"] = sum(padding) / len(padding)
    out["verdict"] = verdict(out)
    return out


ADVICE = {  # phase → (share of the time from which on it is worth a line, what to try)
    "data": (0.1, "more --num_workers, a faster disk, or less work for each sample"),
    "waiting": (0.15, "the network, or a rank that is slower than the others"),
    "other": (0.1, "what the loop does on the host besides training"),
    "logging": (0.02, "a larger --log_interval, or a faster disk"),
    "evaluation": (0.15, "a larger --eval_interval or fewer --eval_steps"),
    "checkpoint": (0.05, "a larger --save_interval, or a faster disk"),
    "lost": (0.05, "a smaller --save_interval"),
}


def verdict(out: dict) -> list[str]:
    """Lines: whether it slowed down, and what takes more of the time than it should."""
    lines = [describe_event({**e, "ended": None}) + (f" It ended at step {e['ended']}."
             if "ended" in e else "") for e in out["slowdowns"]]  # fmt: skip
    slower = any(e["kind"] != "work" for e in out["slowdowns"])
    whole = sum(out["seconds"].values()) or 1.0
    for name, (share, advice) in ADVICE.items():
        if out["seconds"][name] > share * whole:
            lines.append(f"{name} takes {out['seconds'][name] / whole:.0%} of the time: {advice}")
    padding = out["figures"].get("padding_fraction", 0.0)
    if padding > 0.2:
        lines.append(f"padding is {padding:.0%} of what is computed: --packing, or a larger "
                     "--group_window")  # fmt: skip
    return lines if slower else ["steady: no slow-down found", *lines]


def report_text(out: dict) -> str:
    seconds, figures = out["seconds"], out["figures"]
    whole = sum(seconds.values()) or 1.0
    lines = [f"time    {duration(out['wall_s'])} since the run began"]
    for name, s in seconds.items():
        if s >= 0.001 * whole:
            bar = "█" * round(40 * s / whole)
            lines.append(f"        {name:10s} {s / whole:6.1%} {duration(s):>7s}  {bar}".rstrip())
    if "step_ms_median" in figures:
        lines.append(f"steps   {figures['step_ms_median']:.4g} ms (median), first tenth "
                     f"{figures['first_tenth_ms']:.4g} ms, last tenth "
                     f"{figures['last_tenth_ms']:.4g} ms")  # fmt: skip
    if "padding_fraction" in figures:
        lines.append(f"padding {figures['padding_fraction']:.1%} of the tokens computed")
    if out["slowest"]:
        lines.append("slowest " + ", ".join(f"step {s} ({ms:.0f} ms)" for s, ms in out["slowest"]))
    good = sum(seconds[name] for name in (*STEP_PHASES[1:], "training"))
    lines.append(f"goodput {good / whole:.1%} of the time was training, "
                 f"{seconds['lost'] / whole:.1%} was lost to crashes")  # fmt: skip
    kinds = [row["anomaly"] for row in out["anomalies"]]
    for kind in sorted(set(kinds)):
        steps = [str(row["step"]) for row in out["anomalies"] if row["anomaly"] == kind]
        lines.append(f"odd     {kind} at step {', '.join(steps[:8])}{' …' * (len(steps) > 8)}")
    lines += [f"{'verdict' if i == 0 else '':7s} {line}" for i, line in enumerate(out["verdict"])]
    return "\n".join(lines)


def side_by_side(reports: list[dict]) -> str:
    """A table with a column for each run, and how the others compare with the first."""
    rows = {f"{name} s": [r["seconds"][name] for r in reports] for name in reports[0]["seconds"]}
    names = dict.fromkeys(name for r in reports for name in r["figures"])
    rows |= {name: [r["figures"].get(name, math.nan) for r in reports] for name in names}
    lines = [" " * 24 + "".join(f"{Path(r['run']).name[-20:]:>22s}" for r in reports)]
    for name, values in rows.items():
        cells = [f"{values[0]:22.4g}"]
        for value in values[1:]:
            ratio = f" ({value / values[0]:.2f}x)" if values[0] else ""
            cells.append(f"{f'{value:.4g}{ratio}':>22s}")
        lines.append(f"{name:24s}" + "".join(cells))
    return "\n".join(lines)


def regression_percent(reports: list[dict]) -> float:
    """How much longer a token takes: in later runs than in the first, or at the end of one run."""
    if len(reports) > 1:
        rates = [r["figures"].get("perf/tokens_per_second", math.nan) for r in reports]
        return 100 * max(rates[0] / rate - 1 for rate in rates[1:])
    standing = [e["percent"] for e in reports[0]["slowdowns"]
                if e["kind"] != "work" and "ended" not in e]  # fmt: skip
    return max(standing, default=0.0)


def main(argv: list[str]) -> int:
    """Exit code 0; 2 where a run cannot be read; 3 for a regression of more than was allowed."""
    parser = argparse.ArgumentParser("monitor.py", description="Say where the time of a run went, "
                                     "whether it slowed down, since when and why.")  # fmt: skip
    parser.add_argument("run_dir", nargs="+", help="two or more are shown side by side")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--fail_on_regression", "--fail-on-regression", type=float,
                        metavar="PERCENT", help="exit with 3 where a run is slower than the first "
                        "by more than this, or one run has slowed down by more")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        reports = [report(Path(path)) for path in args.run_dir]
    except (OSError, KeyError) as e:
        print(f"monitor.py: error: not a run directory with a metrics.jsonl: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(reports, indent=1))
    else:
        for r in reports:
            print(f"run     {r['run']}: step {r['step']}\n{report_text(r)}\n")
        if len(reports) > 1:
            print(side_by_side(reports))
    limit = args.fail_on_regression
    return 3 if limit is not None and regression_percent(reports) > limit else 0


# --- files and the system --------------------------------------------------------------------


def open_tensorboard(folder: Path, first_step: int, cfg: Config):
    """A SummaryWriter that goes on from an earlier process, with charts and the configuration."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    if cfg.wandb:
        import wandb

        wandb.init(project="steady", dir=str(folder.parent), config=dataclasses.asdict(cfg),
                   sync_tensorboard=True)  # fmt: skip
    put_event_files_in_order(folder)
    # With the default queue of 10 a slow disk blocks training. purge_step hides what an
    # interrupted run wrote after the checkpoint that this one started from.
    writer = SummaryWriter(folder, purge_step=first_step, max_queue=10_000,
                           flush_secs=cfg.tensorboard_flush_secs)  # fmt: skip
    by_dataset = {"loss by dataset": ["Multiline", ["train/loss/.*", "val/loss/.*"]]}
    writer.add_custom_scalars({"steady": {
        "loss": ["Multiline", ["train/loss$", "val/loss$"]],
        **(by_dataset if len(cfg.data) > 1 else {}),
        "phases, stacked (ms a step)": ["Multiline", ["stacked/.*"]],
        "throughput": ["Multiline", ["perf/tokens_per_second"]],
        "step time (ms)": ["Multiline", ["perf/step_ms.*"]],
    }})  # fmt: skip
    settings = dataclasses.asdict(cfg)
    writer.add_text("configuration", "\n".join(f"    {k}: {v}" for k, v in settings.items()), 0)
    simple = {k: v for k, v in settings.items() if isinstance(v, (bool, int, float, str))}
    for summary in hparams(simple, {"train/loss": 0, "val/loss": 0, "perf/tokens_per_second": 0}):
        writer.file_writer.add_summary(summary)
    return writer


def stacked(row: dict) -> dict[str, float]:
    """Phases on top of one another, as TensorBoard itself cannot draw them."""
    names = [n for n in (*STEP_PHASES, *OUTSIDE_PHASES) if f"perf/{n}_ms" in row]
    sums = itertools.accumulate(row[f"perf/{n}_ms"] for n in names)
    return {f"stacked/{i}_{n}": s for i, (n, s) in enumerate(zip(names, sums, strict=True), 1)}


def put_event_files_in_order(folder: Path):
    """Let a file that is made now be the last: they are read by the second in their names.

    That second can be the same after a quick restart, or earlier where the clock was set back.
    """
    now = int(time.time())
    for old in folder.glob("events.out.tfevents.*"):
        second, rest = old.name.split(".", 4)[3:]
        if int(second) >= now:
            old.rename(folder / f"events.out.tfevents.{now - 1:010d}.{second}.{rest}")


def read_rows(path: Path, start: int = 0) -> list[tuple[int, dict]]:
    """(where it ends in the file, row) of a metrics.jsonl, from the byte `start` on.

    Without a row that begins before, and the torn last one of a process that was killed.
    """
    rows = []
    with open(path, "rb") as file:
        file.seek(start)
        end = start + (len(file.readline()) if start else 0)
        for line in file:
            end += len(line)
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if line.endswith(b"\n") and "step" in row:
                    rows.append((end, row))
    return rows


TAIL_BYTES = 1 << 18  # what is read of an old metrics.jsonl on resume: some hundred rows


def open_metrics(path: Path, start_step: int) -> tuple:
    """(metrics.jsonl to append to, (its newest rows, those that were cut off)).

    Rows after start_step are cut off, for those steps are made again, and so is a torn last one.
    """
    path.touch()
    size, length = path.stat().st_size, TAIL_BYTES
    while True:
        rows = read_rows(path, max(0, size - length))
        if length >= size or rows and rows[0][1]["step"] <= start_step:
            break
        length *= 2
    kept = [(end, row) for end, row in rows if row["step"] <= start_step]
    os.truncate(path, kept[-1][0] if kept else 0)
    dropped = [row for _, row in rows if row["step"] > start_step]
    return open(path, "a"), ([row for _, row in kept], dropped)


def seconds_so_far(rows: list[dict]) -> dict[str, float]:
    """Wall time of the run at the newest of these rows that tells it, by kind as in `goodput`."""
    for row in reversed(rows):
        row = row.get("end", row)
        if "goodput/wall_s" in row:
            wall = row["goodput/wall_s"]
            shares = {n.removeprefix("goodput/"): v for n, v in row.items() if "goodput/" in n}
            return {n: v * wall for n, v in shares.items() if n != "wall_s"}
    return {}


def seconds_before(kept: list[dict], dropped: list[dict]) -> dict[str, float]:
    """Seconds of a run that goes on after the rows `kept`: what came after them is lost."""
    seconds, with_lost = seconds_so_far(kept), seconds_so_far(dropped)
    if with_lost:
        more = sum(with_lost.values()) - sum(seconds.values())
        seconds["lost"] = seconds.get("lost", 0.0) + more
    return seconds


def memory(device: torch.device) -> dict[str, float]:
    workers = multiprocessing.active_children()
    out = {
        "memory/host_rss_gb": rss_bytes() / 1e9,
        "memory/workers_rss_gb": sum(rss_bytes(w.pid, shared=False) for w in workers) / 1e9,
        "memory/open_files": count_files(),
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        out["memory/allocated_gb"] = stats["allocated_bytes.all.current"] / 1e9
        out["memory/reserved_gb"] = stats["reserved_bytes.all.current"] / 1e9
        out["memory/peak_gb"] = stats["allocated_bytes.all.peak"] / 1e9
        out["memory/alloc_retries"] = stats["num_alloc_retries"]
        with contextlib.suppress(Exception):  # needs nvidia-ml-py
            out["perf/clock_mhz"] = torch.cuda.clock_rate(device)
    return out


def rss_bytes(pid: int | str = "self", shared: bool = True) -> int:
    """Resident memory of a process, with or without files that it has mapped (as tokens are);
    0 where it has ended or the system does not say."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, of_files = map(int, file.read().split()[:3])
            return (resident - of_files * (not shared)) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        if pid != "self":
            return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS: the peak


def count_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def cpu_queue_seconds() -> float:
    """How long the main thread was ready to run but another had its core; 0 if not known."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def process_age_seconds() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return 0.0


def quantile(values, share: float) -> float:
    """The value below which this share of them lies; for a few, 10 times as fast as NumPy's."""
    return sorted(values)[int(share * len(values))]


def si(x: float) -> str:
    """1234567 → 1.23M"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
