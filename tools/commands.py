"""python train.py: training itself, and the flags that only look or test."""

from pathlib import Path

import torch

import config
import train
from data import load_data
from steady.guard import faults
from steady.models.device import pick_dtype
from steady.options import ConfigError
from tools.verify import check_checkpoints, verify_resume


def run(argv: list[str]):
    """What `python train.py` does; ends the process."""
    faults.prepare_process()
    faults.leave(faults.exit_code(main, argv))


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises ConfigError."""
    cfg = config.parse(argv)
    if cfg.check_checkpoints:
        text, valid = check_checkpoints(Path(cfg.check_checkpoints))
        print(text)
        return 0 if valid else 1
    if cfg.verify_resume:
        return verify_resume(argv, cfg)
    if cfg.estimate:
        print(estimate(cfg))
        return 0
    return train.main(argv)


def estimate(cfg: config.Config) -> str:
    """What the run will need. Allocates nothing; reads the data only for vocabulary and epochs."""
    from tools.estimate import report

    if cfg.init_from:
        from steady.models.huggingface import config_from_hf

        cfg = config_from_hf(cfg)
    cfg = config.resolve(cfg)
    if cfg.model == "transformers":
        raise ConfigError(f"--estimate: {cfg.init_from} is trained through transformers' own "
                          "module; only steady's Transformer can be estimated")
    if cfg.vocab_size is None or cfg.epochs:
        load_data(cfg)
    # auto is bf16, also where the CPU at hand is slow at it: the run is for another machine
    precision = "bf16" if cfg.precision == "auto" else cfg.precision
    dtype = pick_dtype(precision, torch.device("cpu"))
    return report(cfg, cfg.world_size, dtype, train.make_optimizers)
