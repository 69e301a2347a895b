"""What a run tells about itself: time by phase, throughput, memory; the log line and the files.

The monitor receives numbers and never reaches into training. An ordinary step costs a few clock
reads; tensors given to it stay on their device until the next log, where all of them leave it in
one copy. `monitor.log(name, value_or_tensor)` from anywhere in the loop adds a metric.

Another sink is a method beside `write_tensorboard`; another device is a line in PEAK_TFLOPS.
"""

import heapq
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

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

STEP_PHASES = ("data", "forward", "backward", "optimizer", "other")
OUTSIDE_PHASES = ("logging", "evaluation", "checkpoint")  # between steps, not part of any
PHASES = STEP_PHASES + OUTSIDE_PHASES


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device for products of this type; None where it is not known."""
    if device.type != "cuda":
        return None
    peaks = PEAK_TFLOPS.get(torch.cuda.get_device_name(device))
    if peaks is None:
        return None
    return peaks[dtype == torch.float32] * 1e12


class Monitor:
    """Times phases, gathers metrics, writes them every `log_interval` steps.

    mode: "off" logs loss and throughput alone, "light" phases, memory and gradient norm as well.
    reduce: [n] tensor → its mean over all ranks; called on every rank at each log.
    out_dir: where metrics.jsonl is written; None on ranks that write nothing.
    flops_per_token, peak: FLOPs of training on one token; FLOP/s of all devices together, or None.
    window_size: steps whose median and 95th percentile are reported.
    """

    def __init__(
        self, *, mode: str, log_interval: int, start_step: int, max_steps: int,
        tokens_per_step: int, flops_per_token: int, peak: float | None, device: torch.device,
        reduce, out_dir: Path | None, tensorboard_dir: Path | None, flush_secs: int,
        window_size: int = 100,
    ):  # fmt: skip
        self.mode, self.log_interval, self.device = mode, log_interval, device
        self.first_step, self.max_steps = start_step + 1, max_steps
        self.tokens_per_step, self.flops_per_token, self.peak = (
            tokens_per_step, flops_per_token, peak,
        )  # fmt: skip
        self.reduce, self.out_dir = reduce, out_dir
        self.tensorboard_dir, self.flush_secs = tensorboard_dir, flush_secs
        self.tensorboard = None  # opened at the first row: importing it costs 0.2 s
        self.metrics_file = None
        self.before = {}  # goodput of the processes that this one continues, in seconds
        if out_dir:
            self.metrics_file, self.before = open_metrics(out_dir / "metrics.jsonl", start_step)
        self.logged_step = start_step
        self.gathered = {}  # name → [sum, count] since the last log, sums on the device
        self.seconds = dict.fromkeys(PHASES, 0.0)  # since the last log
        self.total_seconds = dict.fromkeys(PHASES, 0.0)  # of this process, up to the last log
        self.startup_seconds = process_age_seconds()
        self.window_ms = np.zeros(window_size)  # a ring of step times
        self.slowest = [(0.0, 0)] * 5  # (ms, step), a heap
        self.outside_seconds = 0.0  # between the last step and this
        self.current, self.since = "other", time.perf_counter()
        self.step_began = self.since

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
        return ended

    def log(self, name: str, value):
        """Add to the mean of `name` over this log interval. A tensor is not waited for."""
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if name in self.gathered:
            total = self.gathered[name]
            total[0], total[1] = total[0] + value, total[1] + 1
        else:
            self.gathered[name] = [value, 1]

    def step(self, step: int, learning_rate: float):
        """Step number `step` is done: log if it is due. The first and the last always are."""
        now = time.perf_counter()
        ms = (now - self.step_began - self.outside_seconds) * 1e3
        self.step_began, self.outside_seconds = now, 0.0
        self.window_ms[step % len(self.window_ms)] = ms
        heapq.heappushpop(self.slowest, (ms, step))
        if not self.log_interval:
            return
        if step % self.log_interval == 0 or step in (self.first_step, self.max_steps):
            means = self.means()  # waits for the device and for other ranks: part of the step
            previous = self.phase("logging")
            self.write_row(step, means | self.row(step, learning_rate))
            self.phase(previous)

    def row(self, step: int, learning_rate: float) -> dict[str, float]:
        """What the clocks say about the steps since the last log; starts anew."""
        row = {}
        steps, self.logged_step = step - self.logged_step, step
        ms = {name: seconds / steps * 1e3 for name, seconds in self.seconds.items()}
        self.settle()
        step_ms = sum(ms[name] for name in STEP_PHASES)
        tokens_per_second = self.tokens_per_step / step_ms * 1e3
        flops = tokens_per_second * self.flops_per_token
        row["train/learning_rate"] = learning_rate
        row["train/tokens"] = step * self.tokens_per_step
        row["perf/step_ms"] = step_ms
        row["perf/tokens_per_second"] = tokens_per_second
        row["perf/tflops"] = flops / 1e12
        if self.peak:
            row["perf/mfu"] = flops / self.peak
        if self.mode == "off":
            return row
        row["perf/data_fraction"] = ms["data"] / step_ms
        row |= {f"perf/{name}_ms": ms[name] for name in OUTSIDE_PHASES}
        if self.device.type == "cpu":  # a host clock does not see where a GPU spends its time
            window = self.window_ms[self.window_ms > 0]
            row["perf/step_ms_median"] = float(np.median(window))
            row["perf/step_ms_p95"] = float(np.percentile(window, 95))
            row |= {f"perf/{name}_ms": ms[name] for name in STEP_PHASES}
            compute_ms = ms["forward"] + ms["backward"] + ms["optimizer"]
            row["perf/compute_fraction"] = compute_ms / step_ms
        return row | memory(self.device) | self.goodput()

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

    def means(self) -> dict[str, float]:
        """The gathered metrics, over steps and ranks; one copy from the device for all of them."""
        names = sorted(self.gathered)  # in the same order on every rank
        if not names:
            return {}
        means = [total / count for total, count in (self.gathered[name] for name in names)]
        self.gathered = {}
        stacked = torch.stack([torch.as_tensor(m, dtype=torch.float32).to(self.device).reshape(())
                               for m in means])  # fmt: skip
        return dict(zip(names, self.reduce(stacked).tolist(), strict=True))

    def write_row(self, step: int, row: dict[str, float]):
        """To the screen and, like everything measured between logs, to the files."""
        if self.out_dir:
            print(self.line(step, row), flush=True)
        self.write(step, row)

    def write(self, step: int, row: dict[str, float]):
        """To the files. One that cannot be written is given up with a warning; training goes on."""
        try:
            if self.metrics_file:
                self.write_metrics(step, row)
        except OSError as e:
            self.give_up("metrics.jsonl", e)
            self.metrics_file = None
        try:
            if self.tensorboard_dir:
                self.write_tensorboard(step, row)
        except Exception as e:  # its writer thread passes on whatever it met
            self.give_up("TensorBoard", e)
            self.tensorboard_dir = self.tensorboard = None

    def give_up(self, sink: str, error: Exception):
        print(f"warning: no more {sink}, training goes on: {error}", file=sys.stderr, flush=True)

    def write_metrics(self, step: int, row: dict[str, float]):
        # JSON has no NaN or infinity; they are written as null
        numbers = {k: v if math.isfinite(v) else None for k, v in row.items()}
        self.metrics_file.write(json.dumps({"step": step, **numbers}) + "\n")
        self.metrics_file.flush()

    def write_tensorboard(self, step: int, row: dict[str, float]):
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            put_event_files_in_order(Path(self.tensorboard_dir))
            # With the default queue of 10 a slow disk blocks training. purge_step hides what an
            # interrupted run wrote after the checkpoint that this one started from.
            self.tensorboard = SummaryWriter(
                self.tensorboard_dir, purge_step=self.first_step, max_queue=10_000,
                flush_secs=self.flush_secs,
            )  # fmt: skip
        for name, value in row.items():
            self.tensorboard.add_scalar(name, value, step)

    def line(self, step: int, row: dict[str, float]) -> str:
        left = (self.max_steps - step) * row["perf/step_ms"] / 1e3
        parts = [
            f"step {step:{len(str(self.max_steps))}d}/{self.max_steps}",
            f"loss {row.get('train/loss', math.nan):.4f}",
            f"lr {row['train/learning_rate']:.2e}",
            f"grad {row['train/grad_norm']:.2f}" if "train/grad_norm" in row else "",
            f"{row['perf/step_ms']:.1f} ms",
            f"{si(row['perf/tokens_per_second'])} tok/s",
            f"mfu {row['perf/mfu']:.1%}" if "perf/mfu" in row else "",
            f"data {row['perf/data_fraction']:.1%}" if "perf/data_fraction" in row else "",
            f"mem {row['memory/peak_gb']:.1f} GB" if "memory/peak_gb" in row else "",
            f"rss {row['memory/host_rss_gb']:.2f} GB"
            if "memory/host_rss_gb" in row and "memory/peak_gb" not in row
            else "",
            f"left {duration(left)}",
        ]
        return " | ".join(part for part in parts if part)

    def summary(self) -> str:
        """Where the time of this process went."""
        self.phase(self.current)
        self.settle()
        seconds = {"start-up": self.startup_seconds, **self.total_seconds}
        whole = sum(seconds.values())
        lines = [f"time    {duration(whole)} in this process"]
        for name, s in seconds.items():
            if s >= 0.001 * whole:
                bar = "█" * round(40 * s / whole)
                lines.append(f"        {name:10s} {s / whole:6.1%} {duration(s):>7s}  {bar}")
        if self.device.type == "cpu":
            slowest = sorted((item for item in self.slowest if item[1]), reverse=True)
            named = (f"step {step} ({ms:.0f} ms)" for ms, step in slowest)
            lines.append("slowest " + ", ".join(named))
        goodput = self.goodput()
        lines.append(
            f"goodput {goodput['goodput/training']:.1%} of {duration(goodput['goodput/wall_s'])} "
            f"since the run began was training, {goodput['goodput/lost']:.1%} was lost to crashes"
        )
        return "\n".join(lines)

    def close(self):
        try:
            if self.tensorboard:
                self.tensorboard.close()
        except Exception as e:
            self.give_up("TensorBoard", e)
        try:
            if self.metrics_file:
                self.metrics_file.close()
        except OSError as e:
            self.give_up("metrics.jsonl", e)


def put_event_files_in_order(folder: Path):
    """Let a file that is made now be the last: they are read by the second in their names.

    That second can be the same after a quick restart, or earlier where the clock was set back.
    """
    now = int(time.time())
    for old in folder.glob("events.out.tfevents.*"):
        second, rest = old.name.split(".", 4)[3:]
        if int(second) >= now:
            old.rename(folder / f"events.out.tfevents.{now - 1:010d}.{second}.{rest}")


def open_metrics(path: Path, start_step: int) -> tuple:
    """(metrics.jsonl to append to, seconds of the run so far by kind, as `goodput` counts them).

    Rows after start_step go, for those steps are made again, and so does a torn last one.
    """
    kept, dropped = [], []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
                (kept if row["step"] <= start_step else dropped).append(row)
            except (ValueError, KeyError):
                continue  # the last line of a process that was killed
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in kept))
    os.replace(draft, path)
    last, lost = ([r for r in rows if "goodput/wall_s" in r][-1:] for rows in (kept, dropped))
    seconds = {}
    if last:
        wall = last[0]["goodput/wall_s"]
        names = [n.removeprefix("goodput/") for n in last[0] if n.startswith("goodput/")]
        seconds = {n: last[0][f"goodput/{n}"] * wall for n in names if n != "wall_s"}
    if lost:
        since = last[0]["goodput/wall_s"] if last else 0.0
        seconds["lost"] = seconds.get("lost", 0.0) + lost[0]["goodput/wall_s"] - since
    return open(path, "a"), seconds


def memory(device: torch.device) -> dict[str, float]:
    gb = {"memory/host_rss_gb": host_rss_bytes() / 1e9}
    if device.type == "cuda":
        gb["memory/allocated_gb"] = torch.cuda.memory_allocated(device) / 1e9
        gb["memory/reserved_gb"] = torch.cuda.memory_reserved(device) / 1e9
        gb["memory/peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return gb


def process_age_seconds() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return 0.0


def host_rss_bytes() -> int:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS: the peak


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
