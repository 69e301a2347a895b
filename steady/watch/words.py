"""What is found, in English: slow-downs and their causes, losses, spikes, what runs out.

A finding is a code with values, which tests and tools compare; sentences are made here alone.
"""

from dataclasses import dataclass, field

DATA_ADVICE = "more --num_workers, a faster disk, or less work for each sample"
CAUSES = {  # code of a Cause → words
    "logging": "a sink that blocks: try another --tensorboard_dir or a larger --log_interval",
    "evaluation": "evaluation, slower or more frequent: see --eval_steps and --eval_interval",
    "checkpoint": "checkpoints, slower or more frequent: a faster disk, a larger --save_interval",
    "checkpoint grows": "something saved each time grows, such as a list that is rewritten",
    "data": f"the loop waits for data: {DATA_ADVICE}",
    "gc": "Python's garbage collector: call gc.freeze() after start-up or make fewer objects",
    "compilations": "recompilation: shapes or flags change; TORCH_LOGS=recompiles names them",
    "allocator": "the CUDA allocator runs out of memory and retries: try a smaller "
                 "--micro_batch_size, or PYTORCH_ALLOC_CONF=expandable_segments:True",
    "thread": "another thread of this process computes: {name}",
    "line": "{line.place}  (±{line.error:.1g}, phase {line.phase})",
    "slow rank": "rank {rank} is slow and the others wait for it: its own work takes {ratio:.2f} "
                 "times as long as theirs, mostly because of {phase}; its machine is slower, or "
                 "its share of the work is larger",
    "unexplained": "unexplained",
    "passed": "it has passed, or too little is left of it to tell why",
    # of the machine
    "clocks": "lower GPU clocks, by heat or the power limit: {readings}",
    "stopped": "the process is stopped and continued by signals: find out what sends SIGSTOP",
    "quota": "a CPU quota holds the container back: raise it, or start fewer threads and loaders",
    "stolen": "the hypervisor gives this machine's cores to others: ask for a machine of your own",
    "contention": "CPU contention: other processes run on these cores; the fewer threads, the less "
                  "it costs (OMP_NUM_THREADS=1)",
    "disk": "the process waits for a disk: page faults, as memory is short, or slow files",
    "network": "collectives take longer, and no rank is slower on average: the "
               "network or the links between them",
    "probe": "the machine is slower, its probe takes {ratio:.2f} times as long: a neighbour on "
             "this host, or lower clocks",
}
VERDICTS = {  # who is to blame → words
    "machine": "the machine, not the program",
    "program": "the rest of the step is as fast as before: the program, not the machine",
    "unclear": "it is not clear whether the machine or the program",
}
RUNS_OUT = ("runs out at about step {at_step:,} of {last_step:,}, by {rate} since about step "
            "{since:,}")
FINDINGS = {  # code of a Finding → words
    "diverged": "training diverged since about step {since}: loss {loss:.4g}, {first:.4g} at the "
                "start, {lowest:.4g} at best",
    "nothing learned": "training has learned nothing: loss {loss:.4g}, a uniform guess has "
                       "{uniform:.4g}",
    "validation": "validation loss {loss:.4g} at step {step}; the lowest was {best:.4g} at step "
                  "{since}",
    "not finite": "{count} of {steps} steps, since step {since}, were not finite and were skipped",
    "host memory": f"host memory {RUNS_OUT}; look for what the loop, or the dataset in each loader "
                   "process, keeps",
    "device memory": f"device memory {RUNS_OUT}; look for tensors that the loop keeps, such as "
                     "losses never detached",
    "open files": f"open files: the limit {RUNS_OUT}; close what is opened, or raise ulimit -n",
    "threads": f"threads: the limit {RUNS_OUT}; look for what starts a thread or a pool of them "
               "again and again",
    "disk space": f"disk space {RUNS_OUT}; fewer checkpoints (--keep_checkpoints, --keep_every), "
                  "or another --out_dir",
}


@dataclass(frozen=True)
class Finding:
    """Something wrong with a run since a step: a code of FINDINGS, and what its words name."""

    code: str
    since: int
    values: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return FINDINGS[self.code].format(since=self.since, **self.values)


def describe_event(event) -> str:
    """Since when something takes longer, by how much, in which phases, why, and whose fault."""
    causes = [str(cause) for cause in event.causes]
    how = "gradually slower" if event.creeps else "slower"
    of_a_step = "" if event.kind == "step" else " of a step"
    phases = ", ".join([f"{name} {ms:+.3g} ms" for name, ms in event.phases] or ["all phases"])
    head = (f"{event.kind} {how} since about step {event.since}: {event.before:.3g} -> "
            f"{event.after:.3g} ms/step ({event.percent:+.0f}%{of_a_step}), {phases}")
    if event.kind != "step":
        return f"{head}: {causes[0]}"
    shared = f"all phases take {event.after / event.before:.2f} times as long: "
    verdict = shared * (event.series == "all phases") + VERDICTS[event.blames]
    return "\n    ".join([head, *causes, verdict])


def describe_end(event) -> str:
    return f"{event.kind} time is back to normal; it was longer since step {event.since}"


def describe_anomaly(row: dict) -> str:
    """What a row of metrics.jsonl says of an anomaly."""
    if row["anomaly"] == "not finite":
        text = "not finite: loss or gradient; without a finite gradient the update was skipped"
    elif row.keys() >= {"value", "median"}:  # else it is a fork's own
        text = f"{row['anomaly']}: {row['value']:.4g}, the median is {row['median']:.4g}"
    else:
        text = row["anomaly"]
    if row.keys() >= {"positions", "rank"}:
        first, end = row["positions"]
        text += f"; rank {row['rank']}, samples {first} to {end - 1}"
    if row.get("first_bad_layer"):
        text += f"; first layer whose output is not finite: {row['first_bad_layer']}"
    return text
