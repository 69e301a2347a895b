"""Ends found during a run: by the clock (--max_minutes) or a plateau of the loss.

Both set max_steps, so that the schedule is complete at the end; checkpoints store it.
"""

import math
import os
import time

from steady.watch.proc import process_age_seconds

UNKNOWN = 10**12  # max_steps until it is set
SETTING_STEP = 100  # at which it is set, or earlier
SETTING_SHARE = 0.3  # of the time, after which it is: the decay may take the rest
LEAST_STEPS = 20  # of this process, that the time of a step is the mean of
RESERVE = 0.02, 2.0  # of the time, and seconds, for the end: a checkpoint, the sample, the report


class Deadline:
    """minutes: since this process was started, or None. A Slurm job may end earlier."""

    def __init__(self, minutes: float | None):
        self.ends = self.began = time.monotonic()
        self.steps = 0  # of this process
        if minutes:
            seconds = 60 * minutes - process_age_seconds()
            job_ends = os.environ.get("SLURM_JOB_END_TIME", "")  # seconds since 1970
            if job_ends.isdecimal() and len(job_ends) < 20:
                left = int(job_ends) - time.time()
                seconds = min(seconds, left) if left > 0 else seconds  # else of an earlier job
            self.ends += seconds
        self.late = self.began + SETTING_SHARE * (self.ends - self.began)

    def set_max_steps(self, run):
        """At SETTING_STEP, on all ranks, set cfg.max_steps for the rest of the run.

        Earlier if steps are slow: until then ranks ask rank 0 in every step.
        An evaluation is taken to last a third of training on as many sequences.
        """
        cfg, progress, now = run.cfg, run.progress, time.monotonic()
        if cfg.max_steps != UNKNOWN or not cfg.max_minutes:  # as when steps are repeated
            return
        self.steps += 1
        early = progress.step < SETTING_STEP or self.steps <= LEAST_STEPS
        if early and not run.ranks.broadcast(now > self.late):
            if self.steps == 1:  # it compiles
                self.began = now
            return
        seconds = (now - self.began) / max(1, self.steps - 1)  # a step, with logs and saves
        evaluation = 0.0
        if run.val_data and cfg.eval_interval:
            batches = cfg.eval_steps or run.val_data.n_samples / cfg.batch_size
            evaluation = seconds * batches / 3 * (2 if cfg.ema else 1)
        left = (self.ends - now) * (1 - RESERVE[0]) - RESERVE[1] - evaluation
        steps = left / (seconds + (evaluation / cfg.eval_interval if cfg.eval_interval else 0.0))
        progress.max_steps = run.ranks.broadcast(progress.step + max(0, int(steps)))
        cfg.max_steps = progress.max_steps
        if run.ranks.rank == 0:
            print(f"step {progress.step}: {cfg.max_steps} steps fit into --max_minutes "
                  f"{cfg.max_minutes:g}, at {seconds * 1e3:.3g} ms/step", flush=True)


def begin_decay(run):
    """With the schedule plateau: decay from here on, and end once that took its share of steps."""
    cfg, progress = run.cfg, run.progress
    end = math.ceil(progress.step / (1 - cfg.decay_fraction))
    if end < cfg.max_steps:
        cfg.max_steps = progress.max_steps = end
        if run.ranks.rank == 0:
            print(f"step {progress.step}: no better loss in {progress.waited} evaluations, so the "
                  f"learning rate decays from here to step {end}", flush=True)


def rate_jump(run, learning_rate) -> str:
    """A line if the newest update had another rate than the schedule gives it; or ""."""
    group, step = run.optimizers[0].param_groups[0], run.progress.step
    before, now = (learning_rate(at, run.cfg) * group.get("lr_scale", 1.0)
                   for at in (step - 1, step))
    lr = group.get("lr", before)
    if any(math.isclose(lr, known, rel_tol=0.01) for known in (before, now)):
        return ""
    return f"resume  learning rate {lr:.2e} -> {now:.2e}: its schedule has changed"
