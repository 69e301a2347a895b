"""Conflicting options, and values that bounds alone cannot rule out."""

import importlib.util
import re
from dataclasses import fields

from steady.options import ConfigError, nearest


def refuse_conflicts(cfg):
    """Raise ConfigError for the first conflict; cfg has its defaults filled in."""

    def need(ok: bool, name: str, expected: str):
        if not ok:
            raise ConfigError(f"--{name} {getattr(cfg, name)}: expected {expected}")

    need(cfg.head_dim is not None, "n_head", f"a divisor of d_model {cfg.d_model}, or --head_dim")
    need(cfg.head_dim % 2 == 0, "head_dim", "an even number, for the rotary embedding")
    need(cfg.n_head % cfg.n_kv_head == 0, "n_kv_head", f"a divisor of n_head {cfg.n_head}")
    need(len(cfg.rope_scaling) in (0, 1, 4), "rope_scaling", "one number, or four")
    need(len(cfg.rope_scaling) < 4 or cfg.rope_scaling[1] < cfg.rope_scaling[2], "rope_scaling",
         "a low frequency factor, the second, below the high one")
    need(cfg.min_learning_rate <= cfg.learning_rate, "min_learning_rate",
         f"at most learning_rate {cfg.learning_rate}")
    need(not cfg.max_steps or cfg.warmup_steps <= cfg.max_steps, "warmup_steps",
         f"at most max_steps {cfg.max_steps}; a resume keeps the run's unless you give one")
    need(re.fullmatch("auto|[0-9]{1,3}", cfg.num_workers), "num_workers", "a number to 999 or auto")
    names = [*(f.name for f in fields(cfg)), "tokenizer"]
    for name in cfg.allow_change:
        if name not in names:
            raise ConfigError(f"--allow_change {name}: expected the name of an option, data or "
                              f"tokenizer{nearest(name, names)}")
    need(cfg.log_interval or cfg.on_nonfinite == "skip", "on_nonfinite", "--log_interval above 0")
    need(cfg.eval_interval or not cfg.patience, "patience", "--eval_interval above 0")
    need(not cfg.trace or cfg.log_interval and cfg.monitor != "off", "trace",
         "--monitoring light or full, and --log_interval above 0")
    need(cfg.tracker == "none" or importlib.util.find_spec(cfg.tracker), "tracker",
         f"it to be installed: pip install {cfg.tracker}")
    if cfg.stage and (cfg.epochs or cfg.max_minutes or "batch_size" in cfg.allow_change):
        raise ConfigError("--stage: expected --max_steps and the same --batch_size throughout")
    if cfg.eval_only and not (cfg.resume or cfg.auto_resume or cfg.init_from):
        raise ConfigError("--eval_only: expected --resume, --auto_resume or --init_from")
    if sum(map(bool, (cfg.resume, cfg.auto_resume, cfg.overwrite))) > 1:
        raise ConfigError("--resume, --auto_resume and --overwrite cannot be combined")
    for name in ("lora_rank", "resize_embeddings"):
        need(cfg.init_from or not getattr(cfg, name), name, "--init_from too, the initial weights")
    for name in ("lora_alpha", "lora_targets"):
        if not cfg.lora_rank and getattr(cfg, name) != getattr(type(cfg)(), name):
            raise ConfigError(f"--{name}: expected --lora_rank too, else all weights are trained")
    if cfg.lora_rank and cfg.resize_embeddings:
        raise ConfigError("--resize_embeddings: not with --lora_rank, which would leave the new "
                          "rows untrained; train once without it, and adapt what that exports")
