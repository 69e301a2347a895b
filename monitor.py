"""Where a run's time goes, and its metrics: phases, means over a log interval, the log line.

The monitor receives numbers and never reaches into training. An ordinary step costs a few clock
reads; tensors given to it stay on their device until the next log, where all of them leave it in
one copy. `monitor.log(name, value_or_tensor)` from anywhere in the loop adds a metric.

Files, TensorBoard, slow-downs and the report of `python monitor.py RUN_DIR` are in steady/watch/.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from steady.guard.ctrl_c import start

    start("tools.report:main")

import contextlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from config import IGNORE, Config
from steady.options import due
from steady.ranks.ranks import on_device, scalar
from steady.watch.anomalies import AnomalyDetector
from steady.watch.clock import Clock
from steady.watch.goodput import Goodput
from steady.watch.learning import Learning
from steady.watch.machine import Machine
from steady.watch.norms import measure_update
from steady.watch.report import describe_end, describe_event, report, report_text, worth_saying
from steady.watch.sinks import PHASES, STEP_PHASES, Sinks, duration, in_form, quantile, slowest_rank
from steady.watch.slowdowns import SlowdownDetector
from steady.watch.trends import Resources

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
    gather: ([n] tensor, names) → [ranks, n], the same on every rank; called on all at each log.
    autopsy: (step, rank) → what to add to the row of an anomaly: its samples, the first bad layer;
    called on rank 0, or on all ranks where it is `together`.
    replicas: a Replicas, to be compared at the logs.
    datasets: their names. epochs: () → {metric: epochs of each dataset so far}.
    """

    def __init__(self, cfg: Config, device: torch.device, *, start_step: int, start_tokens: int = 0,
                 flops_per_token: int, peak: float | None, out_dir: Path | None,
                 gather=lambda values, names: values[None], autopsy=lambda step, rank: {},
                 together=False, replicas=None, datasets=(), epochs=dict):
        self.cfg, self.device, self.gather, self.out_dir = cfg, device, gather, out_dir
        self.flops_per_token, self.peak = flops_per_token, peak
        self.first_step, self.logged_step, self.last_step = start_step + 1, start_step, start_step
        self.tokens = self.logged_tokens = start_tokens
        self.padded_tokens = 0  # since the last log, of all ranks
        self.sinks = Sinks(cfg, out_dir, start_step)
        self.write = self.sinks.write  # (step, row) → metrics.jsonl and TensorBoard
        self.goodput = Goodput(self.sinks.kept, self.sinks.dropped)
        self.slowdowns, self.learning = SlowdownDetector(), Learning(cfg.vocab_size)
        for row in self.sinks.kept:  # of earlier processes, which have said what they found
            self.learning.add(row)
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
        self.clock = Clock(device, cfg.window_size, cfg.monitor != "off")
        self.phase = self.clock.phase  # (name) → the phase that ends as `name` begins
        self.machine, self.read_step = Machine(device), start_step

    # --- what the loop calls ---

    def log(self, name: str, value, weight=1):
        """Add `value` to the metric `name`: total over total weight in this log interval.

        A weight of 1 gives the mean over steps and ranks. Never syncs with the device. All ranks
        must log the same names, since their values are gathered by position.
        """
        if not self.cfg.log_interval:
            return
        value, weight = scalar(value), scalar(weight)
        total, total_weight = self.gathered.get(name, (0, 0))
        self.gathered[name] = total + value, total_weight + weight

    def due(self, step: int, every: int | None = None) -> bool:
        """Whether a measurement made every so many steps (None: at each log) is due in this one.

        It always is in the first step of a process and the last step of the run, unless it is off.
        """
        every = self.cfg.log_interval if every is None else every
        return due(step, every, self.first_step, self.cfg.max_steps)

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
        self.clock.end_step(step)
        self.last_step = step
        self.padded_tokens += size.tokens
        self.tokens += size.real_tokens
        loss, self.step_loss = self.step_loss, None
        if not self.cfg.log_interval:
            return
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.excess += [spikes.excess] if spikes else []
        if self.replicas:
            self.replicas.measure(step)
        if self.due(step):
            row = self.gather_values(step, nonfinite)  # waits for the device and for other ranks
            row |= self.rates(step, learning_rate)  # that wait is part of the step
            previous = self.phase("logging")
            self.write_row(step, row | self.readings(step))
            self.phase(previous)
        if step % max(1, self.cfg.log_interval // 8) == 0:
            self.clock.sample_step()

    # --- a log ---

    def gather_values(self, step: int, nonfinite) -> dict[str, float]:
        """Metrics of this log interval over steps and ranks, in one copy from the device."""
        if self.dataset_totals is not None:
            for k, name in enumerate(self.datasets):
                self.log(f"train/loss/{name}", *self.dataset_totals[:, k])
            self.dataset_totals = torch.zeros_like(self.dataset_totals)
        names = sorted(self.gathered)  # in the same order on every rank
        parts = dict(
            totals=[self.gathered[name][0] for name in names],
            weights=[self.gathered[name][1] for name in names],
            losses=self.losses, norms=self.grad_norms, excess=self.excess,
            checksums=self.replicas.take() if self.replicas else [],
            nonfinite=[nonfinite], probes=[self.machine.probe_us],
            own=self.clock.own_ms(step - self.logged_step),
        )
        values = on_device([value for part in parts.values() for value in part], self.device)
        previous = self.phase("waiting") if dist.is_initialized() else None
        table = np.array(self.gather(values, names).tolist())  # [ranks, values]
        if previous:
            self.phase(previous)
        found, end = {}, 0
        for name, part in parts.items():
            found[name] = table[:, end : end + len(part)]
            end += len(part)
        losses, norms, excess = found["losses"], found["norms"], found["excess"]
        if self.replicas:
            self.replicas.compare(found["checksums"])
        self.nonfinite_in_a_row = int(found["nonfinite"][0, 0])
        self.gathered, self.losses, self.grad_norms, self.excess = {}, [], [], []
        sums = zip(names, found["totals"].sum(0).tolist(), found["weights"].sum(0).tolist(),
                   strict=True)
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
        return row | slowest_rank(found["own"], found["probes"][:, 0])

    def rates(self, step: int, learning_rate: float) -> dict[str, float]:
        """Times and rates since the last log; starts the next interval."""
        steps, seconds = step - self.logged_step, self.clock.take_seconds()
        tokens, real_tokens = self.padded_tokens / steps, (self.tokens - self.logged_tokens) / steps
        ms = {name: s / steps * 1e3 for name, s in seconds.items()}
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
            seconds |= dict.fromkeys(STEP_PHASES, 0.0)
        self.goodput.add(seconds)
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
            row |= self.resources.read()
        return row | self.goodput.row()

    def by_phase(self, ms: dict[str, float]) -> dict[str, float]:
        """ms per step in each phase, from the host's clock or from CUDA events."""
        ms, window = self.clock.take_steps(ms)
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
        if finding := self.learning.add({"step": step, **row}):
            self.warn(step, finding["text"])
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
        if growing := self.resources.growing():
            print(f"step {step}: more objects: {growing}", flush=True)

    def line(self, step: int, row: dict[str, float]) -> str:
        last = self.cfg.max_steps
        forms = LINE | VERBOSE_LINE if self.cfg.verbose else LINE
        shown = [in_form(form, row[name]) for name, form in forms.items() if name in row]
        left = duration((last - step) * row["perf/step_ms"] / 1e3)
        return " | ".join([f"step {step:{len(str(last))}d}/{last}", *shown, f"left {left}"])

    def warn(self, step: int, text: str):
        print(f"warning: step {step}: {text}", flush=True)

    def close(self) -> str:
        """Write the last row; returns the report of the run, which TensorBoard also shows."""
        self.goodput.add(self.clock.take_seconds())
        self.clock.current = "logging"  # for the watchdog: an upload of W&B takes its time
        self.goodput.close()
        self.machine.close()
        text = ""
        if self.out_dir:
            end = {"end": self.goodput.row()}  # with what came after the last log
            if slowest := self.clock.slowest_steps():
                end["slowest"] = slowest
            self.write(self.last_step, end)  # where a process that begins earlier cuts it off
            with contextlib.suppress(OSError):  # metrics.jsonl is gone
                text = report_text(report(self.out_dir))
                self.sinks.write_text("diagnosis", f"```\n{text}\n```", self.last_step)
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
