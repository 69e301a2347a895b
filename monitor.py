"""Where a run's time goes, and its metrics: phases, means over a log interval, the log line.

The monitor receives numbers and never reaches into training. An ordinary step costs a few clock
reads; tensors given to it stay on their device until the next log, where all of them leave it in
one copy. `monitor.log(name, value_or_tensor)` from anywhere in the loop adds a metric.

Files and TensorBoard are in steady/telemetry.py, the search for slow-downs in steady/slowdowns.py,
the report in steady/report.py; `python monitor.py RUN_DIR` prints it.
"""

import contextlib
import heapq
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from config import IGNORE, Config
from steady.anomalies import AnomalyDetector
from steady.device_times import DeviceTimes
from steady.goodput import Goodput
from steady.health import measure_update
from steady.limits import Resources
from steady.machine import Machine
from steady.report import describe_end, describe_event, report, report_text, worth_saying
from steady.slowdowns import SlowdownDetector
from steady.telemetry import (
    OUTSIDE_PHASES,
    OWN_PHASES,
    PHASES,
    STEP_PHASES,
    Sinks,
    duration,
    memory,
    quantile,
    si,
    slowest_rank,
)

LINE = {  # what the log line shows besides the step
    "train/loss": "loss {:.4f}",
    "train/learning_rate": "lr {:.2e}",
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
}
VERBOSE_LINE = {f"perf/{name}_ms": f"{name} {{:.1f}}" for name in PHASES}
VERBOSE_LINE["health/param_norm"] = "weights {:.1f}"


class Monitor:
    """Times phases, gathers metrics, writes them every `cfg.log_interval` steps.

    flops_per_token, peak: FLOPs of training on one token; FLOP/s of all devices together, or None.
    out_dir: where rows are written; None on ranks that write nothing.
    gather: [n] tensor → [ranks, n], the same on every rank; called on all of them at each log.
    autopsy: (step, rank) → what to add to the row of an anomaly: its samples, the first bad layer;
    called on rank 0, or on all ranks where it is `together`.
    replicas: a Replicas, to be compared at the logs.
    datasets: their names. epochs: () → {metric: epochs of each dataset so far}.
    """

    def __init__(self, cfg: Config, device: torch.device, *, start_step: int, start_tokens: int = 0,
                 flops_per_token: int, peak: float | None, out_dir: Path | None,
                 gather=lambda values: values[None], autopsy=lambda step, rank: {}, together=False,
                 replicas=None, datasets=(), epochs=dict):
        self.cfg, self.device, self.gather, self.out_dir = cfg, device, gather, out_dir
        self.flops_per_token, self.peak = flops_per_token, peak
        self.first_step, self.logged_step = start_step + 1, start_step
        self.tokens = self.logged_tokens = start_tokens
        self.padded_tokens = 0  # since the last log, of all ranks
        self.sinks = Sinks(cfg, out_dir, start_step)
        self.write = self.sinks.write  # (step, row) → metrics.jsonl and TensorBoard
        self.goodput = Goodput(self.sinks.kept, self.sinks.dropped)
        self.slowdowns = SlowdownDetector()
        for row in self.sinks.kept:
            for event in self.slowdowns.add(row):
                event["said"] = event.get("said") or worth_saying(event)
        self.resources = Resources(cfg, out_dir, device, self.sinks.kept)
        self.anomalies = AnomalyDetector(cfg.window_size, autopsy, bool(out_dir) or together)
        self.replicas = replicas
        self.nonfinite_in_a_row = 0  # steps up to the last log, the same on all ranks
        # metrics, on the device
        self.gathered = {}  # name → (total, weight) since the last log
        self.step_loss = None  # of the step so far: the sum of its micro-batches' shares
        self.losses, self.grad_norms, self.excess = [], [], []  # of every step since the last log
        self.datasets, self.epochs = datasets, epochs
        self.dataset_totals = None  # [2, datasets]: losses and targets since the last log
        if cfg.loss_by_dataset and cfg.monitor != "off" and len(datasets) > 1:
            self.dataset_totals = torch.zeros(2, len(datasets), device=device)
        # time
        self.current, self.since = "other", time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)  # since the last log
        self.step_began, self.outside_seconds = self.since, 0.0  # outside: since step_began
        self.window_ms = deque(maxlen=cfg.window_size)  # of the newest steps since the last log
        self.slowest = [(0.0, 0)] * 5  # (ms, step), a heap
        self.events = DeviceTimes() if device.type == "cuda" and cfg.monitor != "off" else None
        self.machine, self.read_step = Machine(device), start_step

    # --- what the loop calls ---

    def phase(self, name: str) -> str:
        """Begin the phase `name`; returns the phase that this ends."""
        if name in OUTSIDE_PHASES and name != self.current and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # what is still queued belongs to the steps
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
        """Add `value` to the metric `name`: total over total weight in this log interval.

        A weight of 1 gives the mean over steps and ranks. Never syncs with the device. All ranks
        must log the same names, since their values are gathered by position.
        """
        if not self.cfg.log_interval:
            return
        value, weight = (x.detach() if isinstance(x, Tensor) else x for x in (value, weight))
        total, total_weight = self.gathered.get(name, (0, 0))
        self.gathered[name] = total + value, total_weight + weight

    def due(self, step: int, every: int | None = None) -> bool:
        """Whether a measurement made every so many steps (None: at each log) is due in this one.

        It always is in the first step of a process and the last step of the run, unless it is off.
        """
        every = self.cfg.log_interval if every is None else every
        return every > 0 and (step % every == 0 or step in (self.first_step, self.cfg.max_steps))

    def add_loss(self, loss: Tensor, losses: Tensor, batch):
        """A micro-batch's share of the step's mean loss, times the number of ranks, and its losses
        [B, T]; 0 where targets are ignored."""
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss
        if self.dataset_totals is not None:
            add_by_dataset(self.dataset_totals, losses, batch)

    def health(self, step: int, parameters: dict[str, Tensor], norms):
        """Around an optimizer step: norms and the size of the update, if they are due."""
        if self.cfg.monitor != "full" or not self.due(step, self.cfg.health_interval):
            return contextlib.nullcontext()
        return measure_update(parameters, self.log, norms)

    def step(self, step: int, learning_rate: float, grad_norm, size, nonfinite=0.0, spikes=None):
        """Step number `step` is done: log if it is due.

        grad_norm: of all ranks, on the device; size: tokens of all ranks; nonfinite: steps in a row
        that were skipped; spikes: the Spikes of --skip_spikes.
        """
        now = time.perf_counter()
        ms = (now - self.step_began - self.outside_seconds) * 1e3
        self.step_began, self.outside_seconds = now, 0.0
        self.window_ms.append(ms)
        heapq.heappushpop(self.slowest, (ms, step))
        self.padded_tokens += size.tokens
        self.tokens += size.real_tokens
        loss, self.step_loss = self.step_loss, None
        if not self.cfg.log_interval:
            return
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.excess += [spikes.excess] if spikes else []
        if self.events:
            self.events.end()
        if self.replicas:
            self.replicas.measure(step)
        if self.due(step):
            row = self.gather_values(step, nonfinite)  # waits for the device and for other ranks
            row |= self.clocks(step, learning_rate)  # that wait is part of the step
            previous = self.phase("logging")
            self.write_row(step, row | self.readings(step))
            self.phase(previous)
        if self.events and step % max(1, self.cfg.log_interval // 8) == 0:
            self.events.begin(self.current)

    # --- a log ---

    def gather_values(self, step: int, nonfinite) -> dict[str, float]:
        """Metrics of this log interval over steps and ranks, in one copy from the device."""
        if self.dataset_totals is not None:
            for k, name in enumerate(self.datasets):
                self.log(f"train/loss/{name}", *self.dataset_totals[:, k])
            self.dataset_totals = torch.zeros_like(self.dataset_totals)
        names = sorted(self.gathered)  # in the same order on every rank
        totals = [[self.gathered[name][0]] for name in names]
        weights = [[self.gathered[name][1]] for name in names]
        checksums = self.replicas.take() if self.replicas else []
        parts = [*totals, *weights, self.losses, self.grad_norms, self.excess, checksums,
                 [nonfinite], [self.machine.probe_us], self.own_ms(step)]
        values = self.on_device([value for part in parts for value in part])
        previous = self.phase("waiting") if dist.is_initialized() else None
        table = np.array(self.gather(values).tolist())  # [ranks, values]
        if previous:
            self.phase(previous)
        n = len(names)
        cuts = np.cumsum([n, n, *map(len, parts[2 * n : -1])])
        totals, weights, losses, norms, excess, checksums, nonfinite, probes, own = np.split(
            table, cuts, axis=1)
        if self.replicas:
            self.replicas.compare(checksums)
        self.nonfinite_in_a_row = int(nonfinite[0, 0])
        self.gathered, self.losses, self.grad_norms, self.excess = {}, [], [], []
        sums = zip(names, totals.sum(0).tolist(), weights.sum(0).tolist(), strict=True)
        row = {name: total / weight for name, total, weight in sums if weight}
        row["train/loss"] = float(losses.mean())
        bad = ~np.isfinite(losses).all(0) | ~np.isfinite(norms).all(0)
        if self.cfg.monitor != "off":
            row["train/grad_norm"] = float(norms[0].mean())
            row["health/nonfinite_steps"] = int(bad.sum())
            if excess.size:
                row["health/skipped_spikes"] = int((excess[0] != 0).sum())
            for at, anomaly, text in self.anomalies.add(step, losses, norms[0], bad, excess[0]):
                if anomaly:
                    self.write(at, anomaly)
                if text and self.out_dir:
                    hint = f"; see python data.py show {self.out_dir} {at}" if anomaly else ""
                    self.warn(at, text + hint)
        if self.dataset_totals is not None:
            row |= self.epochs()
        return row | slowest_rank(own, probes[:, 0])

    def on_device(self, values: list) -> Tensor:
        """Numbers and tensors of a single element as [n] in fp32, in one copy from the host."""
        numbers = [value for value in values if not isinstance(value, Tensor)]
        numbers = iter(torch.tensor(numbers, dtype=torch.float32, device=self.device).unbind())
        return torch.stack([value.detach().to(self.device, torch.float32).reshape(())
                            if isinstance(value, Tensor) else next(numbers) for value in values])

    def own_ms(self, step: int) -> list[float]:
        """ms per step of this rank's own work by phase, without waiting for other ranks."""
        self.phase(self.current)
        if self.events:
            mean = self.events.means()
            return [mean.get(name, 0.0) for name in OWN_PHASES]
        return [self.seconds[name] / (step - self.logged_step) * 1e3 for name in OWN_PHASES]

    def clocks(self, step: int, learning_rate: float) -> dict[str, float]:
        """Times and rates since the last log; starts the next interval."""
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
        if real_tokens != tokens:
            row["perf/real_tokens_per_second"] = real_tokens / step_ms * 1e3
            row["perf/padding_fraction"] = 1 - real_tokens / tokens
        if self.logged_step == self.first_step - 1:
            # the first step of a process compiles, allocates and fills caches
            self.goodput.add_startup(step_ms / 1e3)
            row["perf/startup_s"] = self.goodput.startup
            self.seconds |= dict.fromkeys(STEP_PHASES, 0.0)
        self.goodput.add(self.seconds)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.logged_step, self.logged_tokens, self.padded_tokens = step, self.tokens, 0
        return row if self.cfg.monitor == "off" else row | self.by_phase(ms)

    def readings(self, step: int) -> dict[str, float]:
        """Of the machine and of memory, since the last log."""
        if self.cfg.monitor == "off":
            return {}
        row = self.machine.read(step - self.read_step)
        self.read_step = step
        every = self.cfg.memory_interval
        if self.due(step, every) if every is not None else self.machine.looked:
            row |= memory(self.device)
            row |= self.resources.read(row)
        return row | self.goodput.row()

    def by_phase(self, ms: dict[str, float]) -> dict[str, float]:
        """ms per step in each phase, from the host's clock or from CUDA events."""
        window = list(self.window_ms)
        self.window_ms.clear()
        if self.events:  # the host's clock does not see where a GPU spends its time
            ms = ms | dict.fromkeys(STEP_PHASES, 0.0) | self.events.means()
            window = self.events.take_steps()
        shown = [name for name in PHASES if name != "waiting" or dist.is_initialized()]
        row = {f"perf/{name}_ms": ms[name] for name in shown}
        if window:
            row["perf/step_ms_median"] = quantile(window, 0.5)
            row["perf/step_ms_p95"] = quantile(window, 0.95)
        total = sum(ms[name] for name in STEP_PHASES) or 1.0
        row["perf/compute_fraction"] = (ms["forward"] + ms["backward"] + ms["optimizer"]) / total
        row["perf/data_fraction"] = ms["data"] / total
        return row

    def write_row(self, step: int, row: dict[str, float]):
        """To the screen and the files, with a warning where steps have become slower."""
        self.write(step, row)
        if not self.out_dir:
            return
        print(self.line(step, row), flush=True)
        for event in self.slowdowns.add({"step": step, **row}):
            ended = "ended" in event
            if not (event.get("said") if ended else worth_saying(event)):
                continue
            event["said"] = True
            text = describe_end(event) if ended else describe_event(event)
            self.warn(step, text)
            self.sinks.write_text("slow-downs", text, step)
        for text in self.resources.warnings({"step": step, **row}):
            self.warn(step, text)
            self.write(step, {"runs_out": text})  # for the report
        growing = self.resources.growing()
        if growing:
            print(f"step {step}: more objects: {growing}", flush=True)

    def line(self, step: int, row: dict[str, float]) -> str:
        last = self.cfg.max_steps
        forms = LINE | VERBOSE_LINE if self.cfg.verbose else LINE
        shown = [form.format(row[name], si=si(row[name])) for name, form in forms.items()
                 if name in row]
        left = duration((last - step) * row["perf/step_ms"] / 1e3)
        return " | ".join([f"step {step:{len(str(last))}d}/{last}", *shown, f"left {left}"])

    def warn(self, step: int, text: str):
        print(f"warning: step {step}: {text}", flush=True)

    def close(self) -> str:
        """Write the last row; returns the report of the run, which TensorBoard also shows."""
        self.phase(self.current)
        self.current = "logging"  # for the watchdog: an upload of W&B takes its time
        self.goodput.add(self.seconds)
        self.goodput.close()
        self.machine.close()
        text = ""
        if self.out_dir:
            end = {"end": self.goodput.row()}  # with what came after the last log
            if self.device.type != "cuda":
                found = sorted(self.slowest, reverse=True)
                end["slowest"] = [[step, round(ms, 3)] for ms, step in found if step]
            self.write(self.logged_step, end)
            text = report_text(report(self.out_dir))
            self.sinks.write_text("diagnosis", f"```\n{text}\n```", self.logged_step)
        self.sinks.close()
        return text


def add_by_dataset(totals: Tensor, losses: Tensor, batch):
    """Add losses [B, T] and target counts to totals [2, datasets], by dataset of each row."""
    counts = (batch.targets != IGNORE).sum(1)
    values = torch.stack((losses.sum(1), counts)).to(totals.dtype)  # [2, B]
    if batch.source is None:
        totals += values.sum(1, keepdim=True)
    else:
        totals.index_add_(1, batch.source, values)


if __name__ == "__main__":
    from tools.report import main

    sys.exit(main(sys.argv[1:]))
