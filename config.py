"""Everything that can be set about a run: one flat dataclass, and how it is filled.

    python train.py --help_all                    every option with its unit and default
    python train.py --config runs/001/config.yaml the same run again

Values come from the defaults below, then --preset, --config, the command line; the last one wins.
To add an option, add a field here and read `cfg.name` where it is used.
"""

import os
from dataclasses import dataclass, replace
from typing import Literal

from steady import options as cli
from steady.conflicts import refuse_conflicts
from steady.options import UNKNOWN, ConfigError, option

# Shapes, with batch and sequence length; rates are those of the GPT-3 paper (arXiv:2005.14165).
MODELS = {
    "gpt2-124m": dict(n_layer=12, n_head=12, n_kv_head=12, d_model=768, d_ff=2048,
                      tie_embeddings=True, seq_len=1024, batch_size=512, learning_rate=6e-4),
    "350m": dict(n_layer=24, n_head=16, n_kv_head=16, d_model=1024, d_ff=2816,
                 tie_embeddings=True, seq_len=1024, batch_size=512, learning_rate=3e-4),
    "1b": dict(n_layer=16, n_head=32, n_kv_head=8, d_model=2048, d_ff=8192, rope_theta=500000.0,
               tie_embeddings=True, seq_len=2048, batch_size=512, learning_rate=2e-4),
    "7b": dict(n_layer=32, n_head=32, n_kv_head=32, d_model=4096, d_ff=11008,
               tie_embeddings=False, seq_len=2048, batch_size=1024, learning_rate=1.2e-4),
}
SHAPE_DEFAULTS = dict(qkv_bias=False, qk_norm=False, rope_theta=10000.0, optimizer="muon",
                      lr_schedule="wsd", weight_decay=0.1, max_steps=1000)

PRESETS = {
    "fast": dict(compile=True, precision="auto", monitor="light", log_interval=50),
    "max_throughput": dict(compile=True, precision="auto", monitor="off", tensorboard=False,
                           eval_interval=0, log_interval=100),
    "low_memory": dict(activation_checkpointing="full", micro_batch_size=1, seq_len=512),
    "debug": dict(precision="fp32", compile=False, max_steps=10, warmup_steps=2, log_interval=1,
                  eval_interval=5, save_interval=5, num_workers="0"),
}

ENDS = {"max_steps", "epochs", "max_minutes"}  # a run has one of them
NEEDED = ("data", "init_from", "model", "seq_len", "max_steps", "batch_size", "micro_batch_size",
          "learning_rate", "out_dir", "auto_resume")  # shown by --help


@dataclass
class Config:
    # Options with the default None get a value in `resolve`, or once the machine is known.
    config: str | None = option(None, "YAML file of options, such as a run's config.yaml",
                                group="run", saved=False, command_line=True, metavar="FILE")
    preset: Literal[tuple(PRESETS)] | None = option(
        None, "a group of options, by name", saved=False, command_line=True)
    out_dir: str | None = option(None, "run directory (default: the next runs/NNN)", saved=False)
    overwrite: bool = option(False, "rename out_dir to OUT_DIR.old and start afresh", saved=False)
    auto_resume: bool = option(
        False, "continue out_dir from its newest checkpoint, or start it", saved=False)
    resume: str | None = option(None, "continue from this checkpoint or backup URL", saved=False)
    allow_change: list[str] = option(
        [], "options that may differ from the checkpoint: seed, batch_size, data, ...", saved=False)
    seed: int = option(1337, "seed of the weights, the data order and dropout", at_least=0,
                       below=2**63, fixed="trajectory")
    eval_only: bool = option(False, "evaluate a checkpoint or --init_from, and exit", saved=False)
    check_checkpoints: str | None = option(
        None, "verify the checkpoints of RUN and exit", saved=False, metavar="RUN")
    verify_resume: int = option(0, "train 2 K steps, repeat the last K, compare every bit and exit",
                                saved=False, metavar="K", at_least=0)
    json: bool = option(False, "after training, print losses, times, verdict as JSON", saved=False)
    estimate: int = option(0, "print estimated memory and time on N devices, then exit",
                           saved=False, metavar="N", at_least=0)

    data: list[str] = option(
        ["stdlib"], "token files or folders to train on, each PATH[:WEIGHT]; 'stdlib' is Python's "
        "own source code, byte by byte", group="data", metavar="PATH[:WEIGHT]")
    stage: list[str] = option(
        [], "other data from a share of max_steps on: 0.8 PATH[:WEIGHT] ...", metavar="SHARE|PATH")
    val_data: list[str] = option(
        [], "token files to validate on (default: those beside --data)", metavar="PATH")
    seq_len: int | None = option(None, "tokens in a row (from --depth or --model)", at_least=1,
                                 at_most=2**24, fixed="trajectory")
    data_mode: Literal["auto", "stream", "documents", "packed"] = option(
        "auto", "stream: blocks of one long stream; documents: one per sample, the loss counts "
        "only responses; packed: several in a row, attention stays inside each; auto: documents if "
        "there are prompts", fixed="trajectory")
    num_workers: str = option(
        "auto", "loader processes per rank; auto is 0 on a CPU, the fastest there", metavar="N")
    pin_memory: bool = option(True, "pin the memory that batches are copied to CUDA from")
    prefetch_factor: int = option(2, "micro-batches prefetched by each loader process", at_least=1,
                                  at_most=1000)

    init_from: str | None = option(None, "initial weights: a Hugging Face folder, or a name on "
                                   "the hub", group="model", metavar="NAME", fixed="trajectory")
    trust_remote_code: bool = option(
        False, "run the code that comes with a model from the hub", saved=False, command_line=True)
    lora_rank: int = option(0, "rank of LoRA adapters on frozen weights; 0: off", at_least=0,
                            at_most=2**16, fixed="weights")
    lora_alpha: float | None = option(
        None, "LoRA scale times lora_rank (default: 2 lora_rank)", above=0, fixed="function")
    lora_targets: list[str] = option(
        ["all-linear"], "layers to adapt, by name suffix: q_proj, ...", fixed="weights")
    resize_embeddings: bool = option(False, "add rows for new token ids, each the mean of the old")
    depth: int | None = option(None, "layers; they determine shape and recipe (default: 2)",
                               at_least=1, at_most=200)
    model: Literal[("default", *MODELS, "transformers")] = option(
        "default", "shape by name; transformers: another architecture, from --init_from")
    n_layer: int | None = option(
        None, "transformer blocks (default, as below: from --depth or --model)", at_least=1,
        at_most=10_000, fixed="weights")
    n_head: int | None = option(None, "query heads", at_least=1, at_most=2**20, fixed="weights")
    n_kv_head: int | None = option(None, "key and value heads; fewer than n_head is GQA",
                                   at_least=1, at_most=2**20, fixed="weights")
    head_dim: int | None = option(None, "width of a head (default: d_model / n_head)", at_least=2,
                                  at_most=2**20, fixed="weights")
    d_model: int | None = option(
        None, "width of the residual stream", at_least=1, at_most=2**20, fixed="weights")
    d_ff: int | None = option(None, "width of the SwiGLU layer", at_least=1, at_most=2**20,
                              fixed="weights")
    vocab_size: int | None = option(
        None, "vocabulary size (default: the data's)", at_least=1, at_most=2**31, fixed="weights")
    qkv_bias: bool | None = option(
        None, "bias in the query, key and value projections (Qwen2)", fixed="weights")
    qk_norm: bool | None = option(None, "RMSNorm on queries and keys (Qwen3)", fixed="weights")
    tie_embeddings: bool | None = option(
        None, "use one matrix for the embedding and the output", fixed="weights")
    rope_theta: float | None = option(None, "base of the rotary embedding's wavelengths",
                                      at_least=1, at_most=1e30, fixed="function")
    rope_scaling: list[float] = option(
        [], "factor that stretches the rotary embedding; or Llama 3.1's four: factor, low and high "
        "frequency factor, original context", above=0, fixed="function")
    max_position: int | None = option(None, "context of an export (default: seq_len)", at_least=1)
    norm_eps: float = option(1e-6, "epsilon of the RMSNorms", above=0, fixed="function")
    dropout: float = option(0.0, "rate in attention, blocks and embeddings", at_least=0, below=1)
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = option(
        "auto", "SDPA backend, refused if it cannot run here; auto: any, on a CPU also matmul")
    activation_checkpointing: Literal["none", "full"] = option(
        "none", "full recomputes each block in the backward pass: less memory, 1/3 more work")

    max_steps: int | None = option(None, "total optimizer steps (default: from --depth, or 1000)",
                                   group="optimization", at_least=1, at_most=10**12)
    epochs: int | None = option(
        None, "passes over the data, in place of max_steps", at_least=1, at_most=10**6, saved=False)
    max_minutes: float | None = option(
        None, "minutes from the start of the process; sets max_steps", above=0, at_most=1e7)
    batch_size: int | None = option(
        None, "sequences per optimizer step, over all devices (default: from --depth, --model)",
        at_least=1, at_most=2**24, fixed="trajectory")
    micro_batch_size: int | None = option(
        None, "sequences per device and forward pass, with the same result (default: up to 16,384 "
        "tokens; 65,536 with much GPU memory)", at_least=1, at_most=2**24)
    optimizer: Literal["adamw", "muon"] | None = option(
        None, "muon: Muon for 2-D block weights, AdamW for the rest (default; --init_from: adamw)")
    learning_rate: float | None = option(
        None, "peak rate (default: from --depth or --model, less for larger d_model)", above=0)
    min_learning_rate: float = option(0.0, "learning rate at the end of the schedule", at_least=0)
    warmup_steps: int | None = option(None, "warm-up (default: 2 %% of max_steps)", at_least=0)
    lr_schedule: Literal["cosine", "wsd", "constant"] | None = option(
        None, "wsd: constant, then a linear decay (default: wsd; cosine with --init_from)")
    decay_fraction: float = option(0.7, "share of max_steps in wsd's decay", at_least=0, at_most=1)
    weight_decay: float | None = option(
        None, "decoupled, of 2-D block weights (default: from --depth, else 0.1)", at_least=0)
    beta1: float = option(0.9, "AdamW's first moment decay", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW's second moment decay", at_least=0, below=1)
    grad_clip: float = option(1.0, "global gradient norm to clip to; 0: off", at_least=0)
    ema: float = option(
        0.0, "decay of averaged weights, which are evaluated, sampled from and exported; 0: none",
        at_least=0, below=1)
    on_nonfinite: Literal["skip", "rollback", "abort"] = option(
        "skip", "after max_nonfinite non-finite steps in a row, all skipped: keep skipping, "
        "rollback to the newest checkpoint and go on with later samples, or abort")
    max_nonfinite: int = option(10, "see --on_nonfinite", at_least=1)
    skip_spikes: float = option(0.0, "skip steps whose loss or gradient norm is this many standard "
                                "deviations above the last 128; 0: never", at_least=0)

    log_interval: int = option(
        50, "steps between log lines", group="logs and evaluation (intervals in steps; 0 is never)",
        at_least=0)
    eval_interval: int = option(500, "steps between evaluations, and one at the end", at_least=0)
    eval_steps: int = option(64, "batches of batch_size in an evaluation; 0: all data", at_least=0)
    patience: int = option(0, "end after N evaluations without a new best; 0: never", at_least=0)
    sample_interval: int | None = option(
        None, "steps between samples of text (default: one at the end; 0: none)", at_least=0)
    monitor: Literal["off", "light", "full"] = option(
        "light", "off: loss and throughput; light: also phases, memory, anomalies; full: also "
        "norms of weights and updates, and the output's entropy", flag="monitoring")
    trace: int = option(0, "first of three steps to trace; 0: none", at_least=0, saved=False)
    peak_tflops: float | None = option(
        None, "peak TFLOP/s of an unknown device, for MFU and --estimate", above=0)
    tensorboard: bool = option(True, "write TensorBoard event files")
    tensorboard_dir: str | None = option(
        None, "folder of event files (default: the cloud's, or out_dir/tensorboard)", metavar="DIR")
    tensorboard_flush_secs: int = option(120, "seconds between flushes", at_least=1, at_most=10**6)
    tracker: Literal["none", "wandb", "swanlab", "trackio"] = option("none", "send metrics there")
    wandb: bool = option(False, "the same as --tracker wandb", saved=False)

    save_interval: int = option(100, "steps between checkpoints, and one at the end",
                                group="checkpoints (intervals in steps; 0 is never)", at_least=0)
    keep_checkpoints: int = option(3, "newest checkpoints to keep, besides the best", at_least=1)
    backup_to: str | None = option(None, "copy the newest checkpoint, the best and the logs to "
                                   "file://, s3://, …", metavar="URL")

    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "auto", "where to train", group="device and distribution")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "autocast dtype; auto is bf16 where the hardware supports it")
    compile: bool | None = option(None, "torch.compile the model (default: on CUDA only)")
    deterministic: bool = option(False, "deterministic algorithms on CUDA: slower, same bits")
    parallel: Literal["ddp", "zero2", "zero3"] = option(
        "ddp", "ddp replicates all; zero2 shards gradients and optimizer, zero3 also weights")
    shard_size: int = option(0, "ranks per model copy (0: all)", at_least=0)
    cache_clear_interval: int = option(100, "steps between clearings of CUDA's cache", at_least=0)
    hang_seconds: int = option(
        300, "seconds without progress until the stuck rank is named and the run ends, six times "
        "as many at the start and between steps; 0: never", at_least=0, at_most=10**7)
    check_replicas_interval: int = option(
        1000, "steps between checks that ranks hold the same weights; 0: never", at_least=0)


def train_parser(everything: bool = True):
    return cli.make_parser(Config, "train.py", "[--option value ...]", "Train a language model.",
                           NEEDED, everything)


def parse(argv: list[str], saved: str | None = None) -> Config:
    """The Config that `argv` asks for. Raises ConfigError.

    saved: config.yaml of the run that is being continued; it stands in for the defaults. Presets
    and files become flags before `argv`, so that one parser checks them all and the last one wins.
    """
    parser = train_parser(everything=not {"--help_all", "--help-all"}.isdisjoint(argv))
    given = cli.read_flags(parser, argv)
    named = given.depth or any(flag.split("=")[0] == "--model" for flag in argv)
    drop = {"head_dim", "depth", "qk_norm"}.union(*MODELS.values()) if named else set()
    drop |= {"warmup_steps", *of_depth(1)} if given.depth else set()
    flags = [f"--{name}={value}" for name, value in PRESETS.get(given.preset, {}).items()]
    flags += cli.yaml_flags(parser, Config, given.config, drop) if given.config else []
    flags += argv
    ends = {flag.split("=")[0].replace("-", "_") for flag in flags} & {f"__{e}" for e in ENDS}
    if saved:  # it also sets the run's end, unless flags set another
        flags = cli.yaml_flags(parser, Config, saved, drop | (ENDS if ends else set())) + flags
    cfg = Config(**vars(cli.read_flags(parser, flags)))
    if sum(bool(getattr(cfg, name)) for name in ENDS) > 1:
        raise ConfigError("--max_steps, --epochs and --max_minutes: expected one of them")
    cli.check_bounds(cfg)
    for name in ("out_dir", "resume", "init_from", "tensorboard_dir", "check_checkpoints"):
        if path := getattr(cfg, name):
            setattr(cfg, name, os.path.expanduser(path))
    return cfg


def of_depth(depth: int) -> dict:
    """The shape of --depth and its recipe.

    Tokens grow like weights, as depth^3 (arXiv:2203.15556), batch and steps by the square root of
    that each. Weight decay averages over the same share of a run (arXiv:2505.13738).
    """
    n_head = depth if depth >= 4 else 2 * depth  # heads of width 64, or 32
    n_kv_head = n_head // 2 if n_head % 2 == 0 else n_head
    seq_len = min(2048, max(64, 16 * depth**2))
    batch_size = max(1, round(256 * (depth / 2) ** 1.5 / seq_len)) * 8
    max_steps = round(2_048_000 * (depth / 2) ** 3 / (batch_size * seq_len))
    learning_rate = 1.5e-2 * (2 / depth) ** 1.3  # fitted to depths 1 to 4: EXPERIMENTS.md
    return dict(n_layer=depth, n_head=n_head, n_kv_head=n_kv_head, d_model=64 * depth,
                d_ff=176 * depth, qk_norm=True, tie_embeddings=False, seq_len=seq_len,
                batch_size=batch_size, max_steps=max_steps, learning_rate=learning_rate,
                weight_decay=1.5 / (learning_rate * max_steps))


def resolve(cfg: Config) -> Config:
    """Fill in --model's values, and check everything that needs no data and no device.

    Options that depend on the machine (device, precision, compile, workers, micro-batch) stay as
    given, so that a run can continue on another machine. Raises ConfigError.
    """
    shape = of_depth(cfg.depth or 2) if cfg.model == "default" else MODELS.get(cfg.model, {})
    shape = SHAPE_DEFAULTS | shape  # --model transformers: set by --init_from
    shape |= {"max_steps": None} if cfg.epochs else {}  # `load_data` knows it
    if cfg.d_model and "d_model" in shape:  # wider models take a lower rate (arXiv:2203.03466)
        shape["learning_rate"] *= min(1.0, shape["d_model"] / cfg.d_model)
    cfg = replace(cfg, **{k: v for k, v in shape.items() if getattr(cfg, k) is None})
    if cfg.depth and cfg.model != "default":
        raise ConfigError(f"--depth {cfg.depth}: not with --model {cfg.model}: both set the shape")
    if cfg.model == "transformers" and not cfg.init_from:
        raise ConfigError("--model transformers: expected --init_from, too")
    cli.check_bounds(cfg)
    if cfg.max_minutes:  # the warm-up lasts until max_steps is known
        cfg.max_steps = UNKNOWN
        cfg.warmup_steps = 100 if cfg.warmup_steps is None else cfg.warmup_steps
    if cfg.warmup_steps is None and cfg.max_steps:
        cfg.warmup_steps = round(0.02 * cfg.max_steps)
    if cfg.head_dim is None and cfg.d_model % cfg.n_head == 0:
        cfg.head_dim = cfg.d_model // cfg.n_head
    cfg.tracker = "wandb" if cfg.wandb else cfg.tracker
    refuse_conflicts(cfg)
    return cfg
