"""Findings of the monitor as data; their English is made here and nowhere else."""

from dataclasses import dataclass, field

# --- the data --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something about a run. code: a key of WORDS; of a part, a key of CAUSES.

    since, until: steps; until is None while it lasts. phase: "step", or the phase meant. ms: per
    step, added or to be gained, out of `of`. side: "machine", "program" or "unclear". line:
    "FILE:LINE FUNCTION". parts: its causes, the largest first. values: figures for the text.
    """

    code: str
    since: int = 0
    values: dict = field(default_factory=dict)
    until: int | None = None
    phase: str = "step"
    ms: float | None = None
    of: float | None = None
    side: str = "unclear"
    line: str = ""
    parts: tuple = ()

    def __str__(self) -> str:
        if self.code in CAUSES:
            return describe_part(self)
        if self.code == "slower":
            return describe_slower(self)
        head = WORDS[self.code].format(since=self.since, of=self.of, **self.values,
                                       needed=(self.of or 0.0) - (self.ms or 0.0))
        return "\n    ".join([head, *(describe_part(part, -1) for part in self.parts)])

    @property
    def cause(self) -> str:
        """The code of its largest part."""
        return self.parts[0].code if self.parts else ""

    def row(self) -> dict:
        """The finding as a row for metrics.jsonl and --json."""
        kept = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return kept | {"parts": [part.row() for part in self.parts], "text": str(self)}


# --- the words -------------------------------------------------------------------------------

CAUSES = {  # code → "meaning; remedy"
    "gc": "Python's garbage collector; collect rarely, after gc.freeze()",
    "thread": "another thread of this process is busy: {name}; move its work to a process",
    "quota": "a CPU quota throttles the container; raise it, or use fewer threads and loaders",
    "stolen": "the hypervisor gives this machine's cores to others; use a machine of your own",
    "contention": "other processes or threads run on these cores; stop them, or use fewer "
                  "threads (OMP_NUM_THREADS=1 suffers least)",
    "disk": "the process waits for a disk; a faster disk, or a local copy",
    "memory": "memory pressure: pages are read again from disk; use fewer loader processes",
    "probe": "the machine is slower: its probe takes {ratio:.2f} times as long; look for a "
             "neighbour on this host, or lower clocks",
    "clocks": "lower GPU clocks, from heat or the power limit: {readings}; check the cooling",
    "stopped": "the process is stopped and continued by signals; find the sender of SIGSTOP",
    "network": "collectives take longer, and no rank is slower than the others; check the network",
    "slow rank": "rank {rank} does {ratio:.2f} times the work of the others, mostly in {phase}; "
                 "look at its machine, and at its share of the work",
    "compilations": "recompilation: shapes or flags change; TORCH_LOGS=recompiles names them",
    "allocator": "the CUDA allocator runs out of memory and retries; a smaller --micro_batch_size, "
                 "or PYTORCH_ALLOC_CONF=expandable_segments:True",
    "data": "the loop waits for data; more --num_workers, a faster disk, or less work per sample",
    "rare data": "a few steps wait long for data; persistent_workers=True, if loaders start there, "
                 "or a faster disk",
    "line": "{source}; {advice}",
    "rare": "a few heavy steps: the mean is {factor:.2f} times the median; a profiler, or a flush?",
    "padding": "{share:.0%} of the tokens computed are padding; --data_mode packed",
    "logging": "logging, or a sink that blocks; ten times the --log_interval, or a local --out_dir",
    "evaluation": "evaluation; twice the --eval_interval, or half the --eval_steps",
    "checkpoint": "checkpoints; twice the --save_interval, or a faster disk",
    "checkpoint grows": "what is saved keeps growing; look for a list that is never cleared",
    "option": "{option}",
    "not clear": "{option}: gain not clear, {low:+.3g} to {high:+.3g} ms",
    "failed": "{option}: failed: {error}",
    "unexplained": "unexplained"}
OF_MACHINE = {"quota", "stolen", "contention", "disk", "memory", "probe", "clocks", "stopped",
              "network"}
SIDES = {"machine": "the machine, not the program", "program": "the program, not the machine",
         "unclear": "machine or program: not clear"}
RUNS_OUT = "runs out at about step {at_step:,} of {last_step:,}: {rate} since about step {since:,}"
WORDS = {  # code → text; "slower" has a function of its own
    "slow": "slow from the start: {of:.3g} ms/step, about {needed:.3g} are needed",
    "trial": "short runs take {of:.3g} ms/step, with another option",
    "diverged": "training has diverged since about step {since}: loss {loss:.4g}, {first:.4g} at "
                "the start, {lowest:.4g} at best",
    "nothing learned": "it has learned nothing: loss {loss:.4g}; a uniform guess: {uniform:.4g}",
    "validation": "validation loss {loss:.4g} at step {step}; the lowest was {best:.4g} at step "
                  "{since}",
    "eager": "torch.compile has given up on {count} functions, eager since about step {since}: "
             "shapes or Python values change (TORCH_LOGS=recompiles names them)",
    "not finite": "{count} of {steps} steps, since step {since}, were not finite (train.py of "
                  "steady skips such updates)",
    "host memory": f"host memory {RUNS_OUT}; look for objects kept by the loop, or by the dataset "
                   "in each loader process (SIGUSR2 records three steps)",
    "device memory": f"device memory {RUNS_OUT}; look for tensors kept by the loop, such as losses "
                     "never detached, and for reference cycles",
    "open files": f"open files: the limit {RUNS_OUT}; close them, or raise ulimit -n",
    "threads": f"threads: the limit {RUNS_OUT}; look for a pool that is started again and again",
    "disk space": f"disk space {RUNS_OUT}; lower --keep_checkpoints, or use another --out_dir"}


def describe_part(part: Finding, sign: int = 1) -> str:
    """A cause in one line: ms, line, meaning, remedy. sign: -1 for a gain."""
    text = CAUSES[part.code].format(**{"source": "", "advice": "", **part.values})
    ms = "" if part.ms is None else f"{sign * part.ms:+.3g} ms"
    place = ": ".join(filter(None, (part.line, text.strip("; "))))
    return "  ".join(filter(None, (ms, place)))


def describe_slower(found: Finding) -> str:
    values = found.values
    if found.until is not None and not found.parts:
        return f"{found.phase} time is back to normal; it was longer since step {found.since}"
    of_a_step = "" if found.phase == "step" else " of a step"
    phases = ", ".join(f"{name} {ms:+.3g} ms" for name, ms in values["phases"]) or "all phases"
    lines = [f"{found.phase} {'gradually ' * values['creeps']}slower since about step "
             f"{found.since}: {found.of:.3g} -> {found.of + found.ms:.3g} ms/step "
             f"({values['percent']:+.0f}%{of_a_step}), {phases}"]
    lines += map(describe_part, found.parts)
    if found.phase == "step":
        lead = "the rest of the step is as fast as before: " * (found.side == "program")
        if values.get("shared"):
            lead = f"all phases take {1 + found.ms / found.of:.2f} times as long: "
        lines.append(lead + SIDES[found.side])
    if found.until is not None:
        lines.append(f"it ended at step {found.until}")
    return "\n    ".join(lines)


def describe_anomaly(row: dict) -> str:
    """A row of metrics.jsonl about a spike or a step that was not finite."""
    text = row["anomaly"]
    if text == "not finite":
        text = "not finite: loss or gradient (train.py of steady skips such an update)"
    elif row.keys() >= {"value", "median"}:  # else it is a fork's own
        text = f"{text}: {row['value']:.4g}, the median is {row['median']:.4g}"
    if row.keys() >= {"positions", "rank"}:
        first, end = row["positions"]
        text += f"; rank {row['rank']}, samples {first} to {end - 1}"
    return text + (f"; see {row['see']}" if "see" in row else "")


def si(x: float) -> str:  # 1234567 → 1.23M
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= 0.9995 * size:  # or it would be 1e+03 of the unit below
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def duration(seconds: float) -> str:  # 3700 → 1h01m
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


# --- the log line ----------------------------------------------------------------------------

LINE = {  # the log line, after the step
    "train/loss": "loss {:#.5g}",
    "train/learning_rate": "lr {:.2e}",
    "train/grad_norm": "grad {:.3g}",
    "perf/step_ms": "{:.1f} ms",
    "perf/tokens_per_second": "{si} tok/s",
    "perf/mfu": "mfu {:.1%}",
    "perf/data_fraction": "data {:.1%}",
    "perf/padding_fraction": "padding {:.1%}",
    "memory/peak_gb": "mem {:.1f} GB",
    "memory/host_rss_gb": "rss {:.2f} GB",
    "health/update_ratio": "update {:.1e}",
    "health/output_entropy": "entropy {:.2f}"}


def log_line(step: int, last: int | None, row: dict[str, float]) -> str:
    """The line of a log. last: the last step of the run, if known."""
    shown = [form.format(row[name], si=si(row[name])) for name, form in LINE.items() if name in row]
    if not last:
        return " | ".join([f"step {step}/?", *shown])
    left = duration(max(0, last - step) * row["perf/step_ms"] / 1e3)
    return " | ".join([f"step {step:{len(str(last))}d}/{last}", *shown, f"left {left}"])
