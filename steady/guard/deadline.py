"""--max_minutes: max_steps is set once the time of a step is known."""

import time

import torch

from steady.options import UNKNOWN
from steady.watch.proc import process_age_seconds

SETTING_STEP = 100  # of this process: then max_steps is set; the warm-up lasts as long
EARLIER_STEPS, EARLIER_SHARE = (2, 5, 12, 35), 0.3  # or at one of these, if so much time is over
RESERVED_SHARE, RESERVED_SECONDS = 0.02, 2.0  # for the last checkpoint, sample and report


class Deadline:
    """minutes: since this process was started."""

    def __init__(self, minutes: float):
        self.began = time.monotonic()
        self.ends = self.began + 60 * minutes - process_age_seconds()
        self.late = self.began + EARLIER_SHARE * (self.ends - self.began)
        self.steps = 0  # of this process so far

    def set_max_steps(self, cfg, progress, ranks, val_data):
        """After each step: at SETTING_STEP set cfg.max_steps for the rest of the run.

        An evaluation is taken to last a third of training on as many sequences.
        """
        self.steps += 1
        if ranks.device.type != "cpu" and self.steps in (1, *EARLIER_STEPS, SETTING_STEP):
            torch.accelerator.synchronize(ranks.device)  # else steps seem as short as their launch
        now = time.monotonic()
        if self.steps == 1:  # the first step compiles
            self.began = now
        early = self.steps in EARLIER_STEPS and ranks.broadcast(now > self.late)
        if cfg.max_steps != UNKNOWN or not (early or self.steps == SETTING_STEP):
            return
        seconds = (now - self.began) / (self.steps - 1)  # a step, with logs and saves
        evaluation = 0.0
        if val_data and cfg.eval_interval:
            evaluation = seconds * (cfg.eval_steps or val_data.n_samples / cfg.batch_size) / 3
            seconds += evaluation / cfg.eval_interval
        left = max(0.0, (self.ends - now) * (1 - RESERVED_SHARE) - RESERVED_SECONDS - evaluation)
        cfg.max_steps = progress.max_steps = ranks.broadcast(progress.step + int(left / seconds))
        if ranks.rank == 0:
            print(f"step {progress.step}: {cfg.max_steps} steps fit into --max_minutes "
                  f"{cfg.max_minutes:g}, at {seconds * 1e3:.3g} ms/step", flush=True)
