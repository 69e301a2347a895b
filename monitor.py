"""Time by phase, slow steps and their causes, in any training loop:

    monitor = Monitor("runs/mine", log_interval=50)
    for step in range(1, n + 1):
        monitor.phase("data");      batch = next(batches)
        monitor.phase("forward");   loss = model(batch)
        monitor.phase("backward");  loss.backward()
        monitor.phase("optimizer"); optimizer.step()
        monitor.step(step, loss=loss, tokens=batch.numel())
    monitor.close()

It needs this file and steady/watch/. A step costs a few clock reads; tensors are read at a log.
"""

if __name__ == "__main__":  # first: the imports below take seconds
    from importlib.util import find_spec

    if find_spec("steady.guard"):  # else a copy in another project: see the last lines
        from steady.guard.process import start

        start("tools.report:main")

import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from steady.watch import proc
from steady.watch.clock import Clock
from steady.watch.findings import describe_anomaly, log_line
from steady.watch.gather import gather, on_host, scalar, slowest_rank
from steady.watch.history import COMPUTE, OUTSIDE_PHASES, PHASES, STEP_PHASES, quantile
from steady.watch.machine import Machine
from steady.watch.report import news, report, report_text, waits_for_lines
from steady.watch.sampler import Sampler, Tracer
from steady.watch.sinks import Sinks, TensorBoard, say
from steady.watch.trends import Spikes

CHECK_SHARE = 1e-3  # of the time, at most, for computing findings
accounted_s = 0.0  # of this process's age, logged by its earlier Monitors


class Monitor:
    """Times phases, gathers metrics, writes a row every `log_interval` steps, reports findings.

    out_dir: only rank 0 writes there; None writes nothing. level: "off" (loss and throughput) or
    more. first_step: of this process; rows from it on are cut off. last_step: of the run, or a
    function returning it. peak_flops: of all devices. about: facts on the run, such as vocab_size.
    tensorboard: its folder, True for out_dir/tensorboard. tracker: (its module, settings to show).
    group: a gloo group of all ranks. datasets: names for `add_losses`. columns: () → more columns.
    autopsy: (step, rank) → more on an anomaly, on every rank. trace: the first of three steps.
    """

    def __init__(self, out_dir, log_interval: int = 50, *, level: str = "light",
                 device: torch.device | None = None, first_step: int | None = None,
                 last_step=None, flops_per_token: int = 0, peak_flops: float | None = None,
                 about: dict | None = None, tensorboard=True, flush_secs: int = 60,
                 tracker=None, group=None, datasets=(), columns=dict, autopsy=None, trace: int = 0):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.out_dir = Path(out_dir).absolute() if out_dir is not None and rank == 0 else None
        self.log_interval, self.level, self.group = max(0, log_interval), level, group
        self.device = device or torch.accelerator.current_accelerator(True) or torch.device("cpu")
        last_step = None if last_step == torch.inf else last_step
        self.last_step = last_step if callable(last_step) else lambda: last_step
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.about, self.columns, self.autopsy, self.trace = about or {}, columns, autopsy, trace
        self.sink_options = dict(tensorboard=tensorboard, flush_secs=flush_secs, tracker=tracker)
        self.first_step, self.sinks, self.spikes, self.healthy = first_step, None, Spikes(), True
        self.gathered = {}  # name → (total, weight) since the last log
        self.losses, self.grad_norms, self.steps = {}, [], 0  # since the last log; losses by step
        self.tokens, self.all_tokens = 0, 0  # this rank's since the last log; all of the run's
        self.datasets, self.dataset_totals = list(datasets), None  # [2, datasets]: losses, targets
        if len(self.datasets) > 1 and level != "off":
            self.dataset_totals = torch.zeros(2, len(self.datasets), device=self.device)
        self.clock = Clock(self.device, level != "off")
        self.phase = self.clock.phase  # (name) → the phase that ends as `name` begins
        self.parts, self.next_check, self.unwritten = [], 0.0, []
        if first_step is not None:
            self.begin(first_step)

    def begin(self, first_step: int):
        """Open the sinks, with the history of earlier processes."""
        self.first_step, self.logged_step = first_step, first_step - 1
        self.newest_step = max(0, first_step - 1)  # some loops count from 0
        if self.out_dir and self.level != "off":
            self.sampler = Sampler(self.clock)
            self.tracer = Tracer(self.out_dir, self.device, self.trace)
            machine = Machine(self.device, first_step - 1, self.out_dir)
            self.parts = [machine, self.sampler, self.tracer]
        if self.out_dir:
            self.sinks = Sinks(self.out_dir, first_step - 1, **self.sink_options)
            self.history = self.sinks.history
            self.all_tokens = self.columns().get("train/tokens", self.history.last("train/tokens"))
            self.write(self.newest_step, {"about": {"last_step": self.last_step()} | self.about})
            for earlier in self.unwritten:
                self.write(*earlier)

    # --- the interface of a loop ---

    def log(self, name: str, value, weight=1):
        """Add `value` to the metric `name`: total over total weight in this log interval.

        A weight of 1 gives the mean over steps, and over the ranks that log it. It never syncs.
        """
        if self.log_interval:
            value, weight = scalar(value), scalar(weight)
            total, total_weight = self.gathered.get(name, (0, 0))
            self.gathered[name] = total + value, total_weight + weight

    def log_all(self, metrics: dict):
        for name, value in metrics.items():
            self.log(name, value)

    def add_losses(self, losses: Tensor, batch):
        """Add a micro-batch: its tokens, its losses [B, T] by dataset (0 for ignored targets)."""
        self.tokens += batch.tokens.numel()
        assert losses.shape == batch.targets.shape, f"losses {[*losses.shape]}: not [B, T]"
        if self.dataset_totals is not None:
            batch.add_by_dataset(self.dataset_totals, losses)

    def due(self, step: int) -> bool:
        """Whether this step is logged: also the first of a process and the last of the run."""
        every, first = self.log_interval, self.first_step in (None, step)
        return every > 0 and (step % every == 0 or first or step == self.last_step()
                              or step - self.logged_step >= every)  # a loop may skip multiples

    def step(self, step: int, *, loss=None, grad_norm=None, tokens: int = 0,
             lr: float | None = None):
        """Step number `step` is done: log if it is due.

        loss and tokens: of this rank (besides `add_losses`' tokens); grad_norm: of all ranks.
        """
        step = int(step)  # it may be NumPy's, or a float
        if self.first_step is None:
            self.begin(step)
        self.clock.end_step()
        self.newest_step = step
        self.tokens += scalar(0 if tokens is None else tokens)
        self.steps += 1
        if not self.log_interval:
            return
        if loss is not None:
            self.losses[self.steps] = scalar(loss)
        if grad_norm is not None and self.level != "off":
            self.grad_norms.append(scalar(grad_norm))
        if self.due(step):
            if self.sinks and self.logged_step < self.first_step:
                self.sinks.use("TensorBoard", TensorBoard.open)  # its import is part of the start
            row, anomalies = self.gather_values(step)  # waits for the device and for other ranks
            row |= self.rates(step, lr)  # the wait is part of the step
            previous = self.phase("logging")
            for anomaly in anomalies:
                self.safely(self.report_anomaly, anomaly)
            if self.sinks:
                self.safely(self.write_row, step, row)
            self.phase(previous)
        if self.parts:
            self.safely(self.tracer.step, step)
        if self.clock.events and step * 0.618034 % 1 * (self.log_interval // 8) < 1:
            self.clock.events.begin(self.clock.name)  # golden ratio: at no period of the loop's

    def write(self, step: int, row: dict):
        """Write a row to metrics.jsonl and the other sinks."""
        if self.first_step is None:  # it opens the sinks
            self.unwritten.append((step, row))
        elif self.sinks:
            self.safely(self.history.append, self.sinks.write(step, row))  # as in the file

    def close(self) -> str:
        """Write the last row; returns the report of the run. Raises nothing."""
        global accounted_s
        for part in self.parts:
            self.safely(part.close, always=True)
        if not self.sinks:
            return ""
        accounted_s = proc.process_age_seconds()
        self.clock.is_cpu, self.clock.events = True, None  # a device that has failed would raise
        self.clock.phase("logging")  # for a watchdog: an upload takes its time
        if self.parts:
            self.safely(self.check)
        self.write(self.newest_step, {"seconds": dict(self.clock.seconds)})  # since the last log
        self.clock.take(1)  # so that a second close adds nothing
        self.sinks.close()
        return self.safely(lambda: report_text(report(self.out_dir))) or ""

    # --- a log ---

    def gather_values(self, step: int) -> tuple[dict[str, float], list[dict]]:
        """(metrics of this log interval over steps and ranks, its anomalies), in one copy."""
        if self.dataset_totals is not None:
            for name, total, weight in zip(self.datasets, *self.dataset_totals, strict=True):
                self.log(f"train/loss/{name}", total, weight)
            self.dataset_totals = torch.zeros_like(self.dataset_totals)
        gathered, self.gathered = self.gathered, {}  # other threads may log meanwhile
        totals = [total for total, _ in gathered.values()]
        weights = [weight for _, weight in gathered.values()]
        totals, weights, losses, norms, tokens = on_host(
            [totals, weights, self.losses.values(), self.grad_norms, [self.tokens]], self.device)
        metrics = {name: pair for name, *pair in zip(gathered, totals, weights, strict=True)}
        mine = [losses, norms, tokens, self.clock.own_ms(self.steps), metrics]
        previous = self.phase("waiting" if dist.is_initialized() else self.clock.current)
        losses, norms, tokens, own, metrics = zip(*gather(mine, self.group), strict=True)  # by rank
        self.phase(previous)
        steps = [step - self.steps + n for n in self.losses]  # those with a loss
        self.step_tokens = sum(count for (count,) in tokens) / self.steps
        row, anomalies = {}, []
        for name in sorted(set().union(*metrics), key=str):
            pairs = [each[name] for each in metrics if name in each]
            if all_weights := sum(weight for _, weight in pairs):
                row[name] = sum(total for total, _ in pairs) / all_weights
        if any(losses):
            row["train/loss"] = sum(map(sum, losses)) / sum(map(len, losses))
        if norms[0]:
            row["train/grad_norm"] = sum(norms[0]) / len(norms[0])
        if self.level != "off" and losses[0] and len({*map(len, losses)}) == 1:
            found = self.safely(self.spikes.add, steps, [*zip(*losses, strict=True)], norms[0])
            anomalies, row["health/nonfinite_steps"] = found or ([], 0)
        return row | slowest_rank(own), anomalies

    def rates(self, step: int, lr: float | None) -> dict[str, float]:
        """Times and rates since the last log; starts the next interval."""
        steps, self.steps, self.losses, self.grad_norms, self.tokens = self.steps, 0, {}, [], 0
        if self.sinks and self.logged_step == self.first_step <= step - 2 * steps:
            say(f"warning: step {step} is update {steps + 1}: count by ones, else times are wrong")
        ms, window = self.clock.take(steps)
        step_ms = max(1e-6, sum(ms[name] for name in STEP_PHASES))
        row = {"perf/step_ms": step_ms}
        row |= {} if lr is None else {"train/learning_rate": scalar(lr)}
        if 0 < self.step_tokens < float("inf"):  # not NaN
            rate, padded = self.step_tokens / step_ms * 1e3, steps * self.step_tokens
            row |= {"train/tokens": self.all_tokens + round(padded), "perf/tokens_per_second": rate}
            row |= self.columns()  # its train/tokens skip padding, include earlier processes
            real = (row["train/tokens"] - self.all_tokens) / padded
            self.all_tokens = row["train/tokens"]
            if flops := rate * self.flops_per_token:
                row["perf/tflops"] = flops / 1e12
                row |= {"perf/mfu": flops / self.peak_flops} if self.peak_flops else {}
            if real < 1 - 1e-6:  # more than by rounding
                row["perf/padding_fraction"] = 1 - real
                row["perf/real_tokens_per_second"] = rate * real
        if self.logged_step == self.first_step - 1:  # it compiles, allocates and fills caches
            row["perf/startup_s"] = max(step_ms / 1e3, proc.process_age_seconds() - accounted_s)
        self.logged_step = step
        if self.level == "off":
            outside = {name: ms[name] * steps / 1e3 for name in OUTSIDE_PHASES}
            return row if "perf/startup_s" in row else row | {"seconds": outside}
        row |= {f"{'perf' if name in PHASES else 'phase'}/{name}_ms": x for name, x in ms.items()
                if x or name != "waiting" or dist.is_initialized()}
        if window:
            row["perf/step_ms_median"] = quantile(window, 0.5)
            row["perf/step_ms_p95"] = quantile(window, 0.95)
        row["perf/compute_fraction"] = sum(ms[name] for name in COMPUTE) / step_ms
        return row | {"perf/data_fraction": ms["data"] / step_ms}

    def write_row(self, step: int, row: dict):
        """Write a row to the files, then the log line, then findings if there are any."""
        for part in self.parts:
            row |= part.read(step)
        self.write(step, row)
        say(log_line(step, self.last_step(), row))
        if self.parts and time.perf_counter() >= self.next_check:
            self.check()

    def check(self):
        """Report new findings; the next check waits until this one was CHECK_SHARE of the time."""
        began = time.perf_counter()
        self.history.about |= {"last_step": self.last_step() or 0}
        for found in news(self.history):
            self.write(self.newest_step, {"finding": found.row()})
            say(f"warning: step {self.newest_step}: {found}")
        self.sampler.hurry = waits_for_lines(self.history)
        self.next_check = began + (time.perf_counter() - began) / CHECK_SHARE

    def report_anomaly(self, row: dict):
        """Write a row, and a warning, about a spike or a step that was not finite."""
        again, step = row.pop("again"), row.pop("step")
        row |= self.autopsy(step, row["rank"]) if self.autopsy else {}
        self.write(step, row)
        if self.sinks and not again:
            say(f"warning: step {step}: {describe_anomaly(row)}")

    def safely(self, call, *args, always: bool = False):
        """call(*args) of the diagnosis; its first error ends it, unless `always`, not training."""
        try:
            return call(*args) if self.healthy or always else None
        except Exception as e:
            self.healthy = False
            place = traceback.extract_tb(e.__traceback__)[-1]
            say(f"warning: the monitor is off after an internal error; training goes on: "
                f"{type(e).__name__}: {e} ({Path(place.filename).name}:{place.lineno})")


if __name__ == "__main__":
    for run_dir in sys.argv[1:] or sys.exit("usage: python monitor.py RUN_DIR ..."):
        Path(run_dir, "metrics.jsonl").is_file() or sys.exit(f"{run_dir}: no metrics.jsonl in it")
        print(report_text(report(Path(run_dir))))
