"""Where a run's time goes, and its metrics: phases, means over a log interval, the log line.

The monitor receives numbers and never reaches into training. An ordinary step costs a few clock
reads; tensors given to it stay on their device until the next log, where all of them leave it in
one copy. `monitor.log(name, value_or_tensor)` from anywhere in the loop adds a metric.

Files, TensorBoard, slow-downs and the report of `python monitor.py RUN_DIR` are in steady/watch/.
"""

if __name__ == "__main__":  # before the imports below, which take seconds
    from steady.guard.process import start

    start("tools.report:main")

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import Config
from steady.guard import spikes
from steady.guard.deadline import UNKNOWN
from steady.models.device import peak_flops
from steady.options import due
from steady.ranks.parallel import gathered
from steady.ranks.ranks import Ranks, gather, on_device, scalar
from steady.tokens.files import IGNORE
from steady.watch.advice import compile_saving
from steady.watch.clock import Clock, Goodput
from steady.watch.evaluation import Update, output_entropy
from steady.watch.learning import AnomalyDetector, Learning
from steady.watch.machine import Machine
from steady.watch.profile import Sampler, Tracer
from steady.watch.report import report, report_text
from steady.watch.sinks import PHASES, STEP_PHASES, Sinks, duration, in_form, quantile, slowest_rank
from steady.watch.slowdowns import SlowdownDetector
from steady.watch.trends import Resources
from steady.watch.words import describe_anomaly, describe_end, describe_event

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


class Monitor:
    """Times phases, gathers metrics, writes them every `cfg.log_interval` steps.

    progress: of the run, at the step before the first one. out_dir: where rank 0 writes rows; None
    to write nothing. flops_per_token: FLOPs of training on one token.
    """

    def __init__(self, cfg: Config, ranks: Ranks, progress, out_dir: Path | None,
                 flops_per_token: int):
        out_dir, device, start_step = None if ranks.rank else out_dir, ranks.device, progress.step
        self.cfg, self.ranks, self.progress, self.out_dir = cfg, ranks, progress, out_dir
        self.device, self.flops_per_token = device, flops_per_token
        peak = cfg.peak_tflops * 1e12 if cfg.peak_tflops else peak_flops(device, ranks.dtype)
        self.peak = peak and peak * ranks.world_size  # FLOP/s of all devices; None: unknown
        self.first_step, self.logged_step, self.last_step = start_step + 1, start_step, start_step
        self.logged_tokens = progress.tokens
        self.tokens = 0  # of this rank since the last log, with padding
        self.sinks = Sinks(cfg, out_dir, start_step)
        self.write = self.sinks.write  # (step, row) → metrics.jsonl and TensorBoard
        self.goodput = Goodput(self.sinks.kept, self.sinks.dropped)
        self.slowdowns, self.learning = SlowdownDetector(), Learning(cfg.vocab_size)
        self.resources, self.anomalies = Resources(cfg, out_dir, device), AnomalyDetector()
        with self.only_warning():  # earlier processes have said what they found in these rows
            for row in self.sinks.kept:
                self.learning.add(row)
                self.slowdowns.add(row)
                self.resources.find(row)
        self.gathered = {}  # name → (total, weight) since the last log
        self.update = None  # that is being made, where its norms are due
        self.losses, self.grad_norms, self.excess = [], [], []  # of every step since the last log
        self.mixture, self.dataset_totals = None, None  # [2, datasets]: losses and targets
        self.clock = Clock(device, cfg.monitor != "off")
        self.phase = self.clock.phase  # (name) → the phase that ends as `name` begins
        self.machine, self.disturbed = Machine(device, start_step), False
        self.sampler, self.tracer, self.advised = None, None, False
        if out_dir and cfg.monitor != "off":
            self.sampler, self.tracer = Sampler(self.clock), Tracer(self, out_dir)

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

    def due(self, step: int) -> bool:
        """Whether this step is logged: also the first of a process and the last of the run."""
        return due(step, self.cfg.log_interval, self.first_step, self.cfg.max_steps)

    def add_losses(self, losses: Tensor, batch, mixture):
        """A micro-batch's losses [B, T], 0 where targets are ignored; of a Mixture of datasets."""
        self.tokens += batch.tokens.numel()
        assert losses.shape == batch.targets.shape, f"losses {[*losses.shape]}: not [B, T]"
        if len(mixture.datasets) > 1 and self.cfg.monitor != "off":
            if self.dataset_totals is None:
                self.mixture = mixture
                self.dataset_totals = torch.zeros(2, len(mixture.datasets), device=self.device)
            batch.add_by_dataset(self.dataset_totals, losses)

    def before_update(self, step: int):
        """With `full`, if it is due: keep the weights, to know the size of the update."""
        if self.cfg.monitor == "full" and self.due(step):
            self.update = Update(self.ranks.shards)

    def after_update(self, model: nn.Module, batch):
        """With `full`, if it is due: norms, the update's size, the output's entropy."""
        if self.update:
            for name, value in self.update.measure().items():
                self.log(name, value)
            self.update = None
            with self.ranks.autocast, gathered(model):
                counted = batch.targets != IGNORE
                real = counted.any()  # not with dummy rows alone
                entropy = output_entropy(model, batch.tokens, counted, batch.documents)
            self.log("health/output_entropy", entropy * real, real)

    def step(self, step: int, learning_rate: float, loss, grad_norm, excess=None) -> list:
        """Step number `step` is done: log if it is due. Returns the anomalies that it then finds.

        loss: this rank's share of the mean, times the number of ranks, and grad_norm, of all ranks,
        both on the device; excess: of Spikes, where --skip_spikes is on.
        """
        self.clock.end_step()
        self.last_step, anomalies = step, []
        if not self.cfg.log_interval:
            return anomalies
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        if excess is not None:
            self.excess.append(excess)
        if self.due(step):
            row, anomalies, tokens = self.gather_values(step)  # waits for device and other ranks
            row |= self.rates(step, learning_rate, tokens)  # that wait is part of the step
            previous = self.phase("logging")
            if self.out_dir:
                self.write_row(step, row | self.readings(step))
            self.phase(previous)
        if self.tracer and self.tracer.busy:
            self.tracer.step(step)
            self.disturbed = True
        if self.clock.events and step % max(1, self.cfg.log_interval // 8) == 0:
            self.clock.events.begin(self.clock.current)  # the step that begins now
        return anomalies

    def gather_values(self, step: int) -> tuple[dict[str, float], list, float]:
        """Of this log interval, over steps and ranks, in one copy: metrics, anomalies, tokens a
        step with padding."""
        if self.mixture:
            for k, dataset in enumerate(self.mixture.datasets):
                self.log(f"train/loss/{dataset.name}", *self.dataset_totals[:, k])
            self.dataset_totals = torch.zeros_like(self.dataset_totals)
        names = sorted(self.gathered)  # in the same order on every rank
        totals, weights = ([self.gathered[name][i] for name in names] for i in (0, 1))
        parts = (totals, weights, self.losses, self.grad_norms, self.excess,
                 [self.tokens / (step - self.logged_step)],
                 self.clock.own_ms(step - self.logged_step))
        values = on_device([value for part in parts for value in part], self.device)
        previous = self.phase("waiting") if dist.is_initialized() else None
        # [values, ranks], as lists: for a few values they are faster than NumPy
        columns = iter(gather(values, names, self.ranks.group).T.tolist())
        if previous:
            self.phase(previous)
        totals, weights, losses, norms, excess, (tokens,), own = ([next(columns) for _ in part]
                                                                  for part in parts)
        self.gathered, self.losses, self.grad_norms, self.excess, self.tokens = {}, [], [], [], 0
        sums = zip(names, map(sum, totals), map(sum, weights), strict=True)
        row = {name: total / weight for name, total, weight in sums if weight}
        means, anomalies = [sum(of_ranks) / len(of_ranks) for of_ranks in losses], []
        row["train/loss"] = sum(means) / len(means)
        if self.cfg.monitor != "off":
            norms, excess = ([of_ranks[0] for of_ranks in each] for each in (norms, excess))
            row["train/grad_norm"] = sum(norms) / len(norms)
            anomalies, row["health/nonfinite_steps"] = self.anomalies.add(step, losses, norms)
            if excess:
                row["health/skipped_spikes"] = sum(map(bool, excess))
            if any(excess):
                steps = range(step - len(losses) + 1, step + 1)
                self.warn(step, spikes.describe(steps, excess, means, norms))
            if not self.out_dir and self.ranks.shards.size == 1:
                anomalies = []  # rank 0 reports them; an autopsy takes all ranks that hold shards
        if self.mixture:
            done = self.mixture.order.epochs(self.progress.position)
            for dataset, epochs in zip(self.mixture.datasets, done, strict=True):
                row[f"train/epochs/{dataset.name}"] = epochs
        return row | slowest_rank(own), anomalies, sum(tokens)

    def rates(self, step: int, learning_rate: float, tokens: float) -> dict[str, float]:
        """Times and rates since the last log; starts the next interval."""
        steps, seconds = step - self.logged_step, self.clock.take_seconds()
        real_tokens = (self.progress.tokens - self.logged_tokens) / steps
        ms = {name: s / steps * 1e3 for name, s in seconds.items()}
        step_ms = sum(ms[name] for name in STEP_PHASES)
        flops = tokens * self.flops_per_token / step_ms * 1e3
        row = {
            "train/learning_rate": learning_rate,
            "train/tokens": self.progress.tokens,
            "perf/step_ms": step_ms,
            "perf/tokens_per_second": tokens / step_ms * 1e3,
            "perf/tflops": flops / 1e12,
        }
        if self.peak:
            row["perf/mfu"] = flops / self.peak
        if real_tokens < tokens * (1 - 1e-6):  # more than by rounding
            row["perf/real_tokens_per_second"] = real_tokens / step_ms * 1e3
            row["perf/padding_fraction"] = 1 - real_tokens / tokens
        if self.logged_step == self.first_step - 1:
            # the first step of a process compiles, allocates and fills caches
            self.goodput.add_startup(step_ms / 1e3)
            row["perf/startup_s"] = self.goodput.startup
            seconds |= dict.fromkeys(STEP_PHASES, 0.0)
        self.goodput.add(seconds)
        self.logged_step, self.logged_tokens = step, self.progress.tokens
        return row if self.cfg.monitor == "off" else row | self.by_phase(ms)

    def readings(self, step: int) -> dict[str, float]:
        """Of the machine and of memory, since the last log."""
        if self.cfg.monitor == "off":
            return {}
        row = self.machine.read(step) | self.goodput.row()
        if "machine/cpu_probe_us" in row:  # not at every log, where they are close
            row |= self.resources.read()
        if self.disturbed or self.resources.allocations:
            row["perf/disturbed"] = 1  # by looking closely: it says nothing of the speed
        self.disturbed = False
        if self.sampler and (profile := self.sampler.take()):
            row["profile"] = profile
        return row

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
        print(self.line(step, row), flush=True)
        with self.only_warning():
            self.diagnose(step, row | {"step": step})

    @contextlib.contextmanager
    def only_warning(self):
        """An error in the diagnosis switches it off; training goes on."""
        try:
            yield
        except Exception as e:
            self.diagnose = lambda *_: None
            print(f"warning: the diagnosis is off: {type(e).__name__}: {e}", flush=True)

    def diagnose(self, step: int, row: dict[str, float]):
        if finding := self.learning.add(row):
            self.warn(step, str(finding))
        for event in self.slowdowns.add(row):
            self.warn(step, describe_event(event) if event.ended is None else describe_end(event))
            if event.kind == "step" and event.ended is None:
                self.tracer.on_slowdown()
        if self.sampler:
            self.sampler.hurry = self.slowdowns.waits
        for text in self.resources.warnings(row):
            self.warn(step, text)
            self.write(step, {"runs_out": text})  # for the report
        if not self.advised and "perf/startup_s" not in row:
            self.advised, steps = True, self.cfg.max_steps - step
            left = steps * row["perf/step_ms"] / 1e3
            self.phase("logging")
            logging = self.clock.seconds["logging"]  # which the wait is no part of
            if saved := compile_saving(self.cfg, self.ranks, steps, left):
                print(f"step {step}: --compile would save about {saved / 60:.0f} minutes of "
                      f"{duration(left)}", flush=True)
            self.phase("logging")
            self.goodput.add_startup(self.clock.seconds["logging"] - logging)
            self.clock.seconds["logging"] = logging

    def report(self, anomaly, found: dict):
        """A row and a warning of an anomaly; found: what faults.autopsy returned."""
        step, row = anomaly.step, anomaly.row(found)
        self.write(step, row)
        if not anomaly.again:
            self.warn(step, f"{describe_anomaly(row)}; see python data.py show "
                            f"{self.out_dir} {step}")

    def line(self, step: int, row: dict[str, float]) -> str:
        last = self.cfg.max_steps
        shown = [in_form(form, row[name]) for name, form in LINE.items() if name in row]
        if last == UNKNOWN:
            return " | ".join([f"step {step}/?", *shown])
        left = duration((last - step) * row["perf/step_ms"] / 1e3)
        return " | ".join([f"step {step:{len(str(last))}d}/{last}", *shown, f"left {left}"])

    def warn(self, step: int, text: str):
        if self.out_dir:
            print(f"warning: step {step}: {text}", flush=True)

    def close(self) -> str:
        """Write the last row; returns the report of the run."""
        self.goodput.add(self.clock.take_seconds())
        self.clock.current = "logging"  # for the watchdog: an upload of W&B takes its time
        if self.out_dir:
            self.goodput.close()
        self.machine.close()
        self.resources.close()
        if self.sampler:
            self.sampler.close()
            self.tracer.close()
        # with what came after the last log; where a process that begins earlier cuts it off
        self.write(self.last_step, {"end": self.goodput.row()})
        self.sinks.close()
        with contextlib.suppress(Exception):  # metrics.jsonl is gone, or odd
            return report_text(report(self.out_dir))
        return ""
