"""What a run tells about itself: time by phase, throughput, memory; the log line and the files.

The monitor receives numbers and never reaches into training. An ordinary step costs a few clock
reads; tensors given to it stay on their device until the next log, where all of them leave it in
one copy. `monitor.log(name, value_or_tensor)` from anywhere in the loop adds a metric.

Another sink is a method beside `write_tensorboard`; another device is a line in PEAK_TFLOPS.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

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
PHASES = (*STEP_PHASES, "logging", "evaluation", "checkpoint")


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
    """

    def __init__(
        self, *, mode: str, log_interval: int, start_step: int, max_steps: int,
        tokens_per_step: int, flops_per_token: int, peak: float | None, device: torch.device,
        reduce, out_dir: Path | None, tensorboard_dir: Path | None, flush_secs: int,
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
        if out_dir:
            self.metrics_file = open_metrics(out_dir / "metrics.jsonl", start_step)
        self.logged_step = start_step
        self.gathered = {}  # name → [sum, count] since the last log, sums on the device
        self.seconds = dict.fromkeys(PHASES, 0.0)  # since the last log
        self.current, self.since = "other", time.perf_counter()

    def phase(self, name: str) -> str:
        """From now on time belongs to phase `name`; returns the phase that this ends."""
        now = time.perf_counter()
        ended = self.current
        self.seconds[ended] += now - self.since
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
        due = self.log_interval and step % self.log_interval == 0
        if due or step in (self.first_step, self.max_steps):
            previous = self.phase("logging")
            self.write_row(step, self.row(step, learning_rate))
            self.phase(previous)

    def row(self, step: int, learning_rate: float) -> dict[str, float]:
        """Everything known about the steps since the last log, mean over ranks; starts anew."""
        row = self.means()  # waits for the device, so the clock below has seen all of the work
        steps, self.logged_step = step - self.logged_step, step
        ms = {name: seconds / steps * 1e3 for name, seconds in self.seconds.items()}
        self.seconds = dict.fromkeys(PHASES, 0.0)
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
        if self.device.type == "cpu":  # a host clock does not see where a GPU spends its time
            row |= {f"perf/{name}_ms": ms[name] for name in STEP_PHASES}
            compute_ms = ms["forward"] + ms["backward"] + ms["optimizer"]
            row["perf/compute_fraction"] = compute_ms / step_ms
        return row | memory(self.device)

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
        if self.metrics_file:
            # JSON has no NaN or infinity; they are written as null
            numbers = {k: v if math.isfinite(v) else None for k, v in row.items()}
            self.metrics_file.write(json.dumps({"step": step, **numbers}) + "\n")
            self.metrics_file.flush()
        if self.tensorboard_dir:
            self.write_tensorboard(step, row)

    def write_tensorboard(self, step: int, row: dict[str, float]):
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

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

    def close(self):
        if self.tensorboard:
            self.tensorboard.close()
        if self.metrics_file:
            self.metrics_file.close()


def open_metrics(path: Path, start_step: int):
    """metrics.jsonl to append to, without the rows that come after start_step or are torn."""
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue  # the last line of a process that was killed
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(kept))
    os.replace(draft, path)
    return open(path, "a")


def memory(device: torch.device) -> dict[str, float]:
    gb = {"memory/host_rss_gb": host_rss_bytes() / 1e9}
    if device.type == "cuda":
        gb["memory/allocated_gb"] = torch.cuda.memory_allocated(device) / 1e9
        gb["memory/reserved_gb"] = torch.cuda.memory_reserved(device) / 1e9
        gb["memory/peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return gb


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
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"
