"""Everything that can be set about a run: one flat dataclass, and how it is filled.

    python train.py --help                        every option with its unit and default
    python train.py --config runs/001/config.yaml the same run again

Values come from the defaults below, then --preset, then --config, then the command line; the later
one wins. To add an option, add a field here and read `cfg.name` where it is used.
"""

import dataclasses
import difflib
import errno
import importlib.util
import os
import random
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter
from dataclasses import dataclass, field
from typing import Literal

import yaml

# A size names a shape and the run it is usually trained with: sequence length, batch and learning
# rate. The rates of the large sizes are those of the GPT-3 paper (arXiv:2005.14165, table 2.1).
MODELS = {
    "default": dict(n_layer=2, n_head=4, n_kv_head=2, d_model=128, d_ff=352, qk_norm=True,
                    tie_embeddings=False, seq_len=64, batch_size=24, learning_rate=1.5e-2),
    "gpt2-124m": dict(n_layer=12, n_head=12, n_kv_head=12, d_model=768, d_ff=2048,
                      tie_embeddings=True, seq_len=1024, batch_size=512, learning_rate=6e-4),
    "350m": dict(n_layer=24, n_head=16, n_kv_head=16, d_model=1024, d_ff=2816,
                 tie_embeddings=True, seq_len=1024, batch_size=512, learning_rate=3e-4),
    "1b": dict(n_layer=16, n_head=32, n_kv_head=8, d_model=2048, d_ff=8192, rope_theta=500000.0,
               tie_embeddings=True, seq_len=2048, batch_size=512, learning_rate=2e-4),
    "7b": dict(n_layer=32, n_head=32, n_kv_head=32, d_model=4096, d_ff=11008,
               tie_embeddings=False, seq_len=2048, batch_size=1024, learning_rate=1.2e-4),
}  # fmt: skip
SHAPE_DEFAULTS = dict(qkv_bias=False, qk_norm=False, rope_theta=10000.0)
# What a checkpoint and the run that goes on from it must agree on: always, and if not allowed.
WEIGHTS = ("n_layer", "n_head", "n_kv_head", "head_dim", "d_model", "d_ff", "vocab_size",
           "tie_embeddings", "qkv_bias", "qk_norm")  # fmt: skip
TRAJECTORY = ("seed", "batch_size", "seq_len", "rope_theta", "rope_scaling", "norm_eps",
              "data_mode", "packing", "group_window")  # fmt: skip

PRESETS = {
    "fast": dict(compile=True, precision="auto", monitor="light", log_interval=50),
    "max_throughput": dict(compile=True, precision="auto", monitor="off", tensorboard=False,
                           eval_interval=0, log_interval=100),
    "low_memory": dict(activation_checkpointing="full", micro_batch_size=1, seq_len=512),
    "debug": dict(precision="fp32", compile=False, max_steps=10, warmup_steps=2, log_interval=1,
                  eval_interval=5, save_interval=5, num_workers="0", detect_anomaly=True),
}  # fmt: skip


class ConfigError(ValueError):
    """What was given cannot be run. The message is one line for the user; the exit code is 2."""


IGNORE = -100  # a target that the loss does not count

TRANSIENT = (errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET,
             errno.ECONNREFUSED, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH)  # fmt: skip


def retry(call, kind: type = OSError, attempts: int = 5, first_seconds: float = 0.5):
    """`call()`, tried again after errors that may pass: 0.5, 1, 2, 4 s later, and up to half more.

    Of an OSError only the TRANSIENT numbers; of other kinds, which the caller names, every one.
    """
    for attempt in range(attempts):
        try:
            return call()
        except kind as e:
            number = getattr(e, "errno", None)
            lasting = isinstance(e, (FileNotFoundError, PermissionError))
            passing = number in TRANSIENT if number else kind is not OSError and not lasting
            if not passing or attempt == attempts - 1:
                raise
            retry.count += 1
            print(f"warning: {e}; tried again", file=sys.stderr, flush=True)
            # not of `random` itself: dropout in a fork may use that, and is to stay as it is
            time.sleep(first_seconds * 2**attempt * (1 + random.SystemRandom().random() / 2))


retry.count = 0  # of this process


def usable_cores() -> int:
    """Cores that this process may run on (a container or a job may have fewer than the machine)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def option(default, help: str, **argparse_kwargs):
    """A field with its help text. A list default is copied for each Config."""
    metadata = {"help": help, **argparse_kwargs}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def switch(help: str):
    """A yes/no whose default depends on something else: --x, --no_x, or neither."""
    return option(None, help, nargs="?", const=True)


@dataclass
class Config:
    # --- the run ---
    config: str | None = option(None, "YAML file of options; a run's config.yaml can be given")
    preset: Literal[tuple(PRESETS)] | None = option(None, "a group of options, by name")
    out_dir: str | None = option(None, "run directory (default: the next runs/NNN)")
    overwrite: bool = option(False, "delete the run that is already in out_dir and start afresh")
    auto_resume: bool = option(
        False, "continue the run in out_dir from its newest checkpoint; start it if there is none"
    )
    resume: str | None = option(
        None, "continue from this checkpoint file, or from a backup: a URL that fsspec knows"
    )
    allow_change: list[str] = option(
        [], "what may differ from the checkpoint that is continued: seed, batch_size, data, ..."
    )
    eval_only: bool = option(
        False, "only evaluate the weights of --resume or --init_from on the validation data"
    )
    seed: int = option(1337, "seed of the weights, the data order and dropout")
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "where to train")

    # --- data ---
    data: list[str] = option(
        ["stdlib"], "token files or folders to train on, each PATH[:WEIGHT]; 'stdlib' is Python's "
        "own source code, byte by byte"
    )  # fmt: skip
    val_data: list[str] = option([], "token files to validate on (default: those beside --data)")
    seq_len: int | None = option(None, "tokens in a sequence (default: from --model)")
    data_mode: Literal["auto", "stream", "documents"] = option(
        "auto", "stream: blocks of one long stream; documents: each sample is one, cut at seq_len, "
        "and the loss counts responses, not prompts; auto is documents where there are prompts"
    )  # fmt: skip
    packing: bool = option(
        False, "documents together in rows of seq_len; attention does not cross from one to another"
    )
    group_window: int = option(
        32, "steps whose documents are sorted by length, so that those of a step are of similar "
        "length and little is padding; 0 leaves them in random order"
    )  # fmt: skip
    loss_by_dataset: bool = option(True, "log the loss of each dataset of a mixture as well")
    num_workers: str = option(
        "auto", "loader processes of each rank: a number, or auto, which measured best: 0 on a CPU"
    )
    pin_memory: bool = option(True, "copy batches to CUDA from page-locked memory")
    prefetch_factor: int = option(2, "micro-batches that each loader process keeps ready")

    # --- model ---
    init_from: str | None = option(
        None, "start from the weights in this Hugging Face folder, or of this name on the hub"
    )
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")
    model: Literal[(*MODELS, "transformers")] = option(
        "default", "shape by name, which the flags below change; transformers is what --init_from "
        "sets where the model is of another kind than ours"
    )  # fmt: skip
    n_layer: int | None = option(None, "transformer blocks (default: from --model, as all these)")
    n_head: int | None = option(None, "query heads")
    n_kv_head: int | None = option(None, "key and value heads; fewer than n_head is GQA")
    head_dim: int | None = option(None, "width of a head (default: d_model / n_head)")
    d_model: int | None = option(None, "width of the residual stream")
    d_ff: int | None = option(None, "width of the SwiGLU feed-forward layer")
    vocab_size: int | None = option(None, "token ids (default: those of the data)")
    qkv_bias: bool | None = switch("bias in the query, key and value projections (Qwen2)")
    qk_norm: bool | None = switch("RMSNorm on queries and keys (Qwen3)")
    tie_embeddings: bool | None = switch("use one matrix for the embedding and the output")
    rope_theta: float | None = option(None, "base of the rotary embedding's wavelengths")
    rope_scaling: list[float] = option(
        [], "factor that stretches the rotary embedding; or factor, low and high frequency factor, "
        "and original context, as in Llama 3.1"
    )  # fmt: skip
    max_position: int | None = option(
        None, "positions an exported model is said to tell apart (default: seq_len)"
    )
    norm_eps: float = option(1e-6, "epsilon of the RMSNorms")
    dropout: float = option(0.0, "probability, on attention, each block's outputs and embeddings")
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = option(
        "auto", "scaled_dot_product_attention backend; one that cannot run here is refused"
    )
    activation_checkpointing: Literal["none", "full"] = option(
        "none", "full recomputes each block in the backward pass: less memory, about 1/3 more work"
    )

    # --- optimization ---
    max_steps: int = option(1000, "optimizer steps in the whole run")
    batch_size: int | None = option(
        None, "sequences per optimizer step, over all devices together (default: from --model)"
    )
    micro_batch_size: str | None = option(
        None, "sequences per device and forward pass; lower it when memory runs out, the result "
        "stays the same; auto tries powers of two for the largest that fits (default: as large as "
        "batch_size allows, up to 16,384 tokens)"
    )  # fmt: skip
    optimizer: Literal["adamw", "muon"] = option(
        "muon", "muon is Muon for the blocks' matrices with AdamW for the rest"
    )
    learning_rate: float | None = option(None, "peak learning rate (default: from --model)")
    min_learning_rate: float = option(0.0, "learning rate that the schedule ends at")
    warmup_steps: int | None = option(None, "steps of linear warm-up (default: 2 %% of max_steps)")
    lr_schedule: Literal["cosine", "wsd", "constant"] = option(
        "wsd", "after the warm-up; wsd is stable, then a linear decay"
    )
    decay_fraction: float = option(0.7, "share of max_steps that wsd spends decaying")
    weight_decay: float = option(0.1, "decoupled weight decay of the blocks' matrices alone")
    beta1: float = option(0.9, "AdamW's first moment decay")
    beta2: float = option(0.95, "AdamW's second moment decay")
    grad_clip: float = option(1.0, "largest global gradient norm; 0 switches clipping off")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "autocast type of the forward pass; auto is bf16 where the hardware multiplies it"
    )
    on_nonfinite: Literal["skip", "rollback", "abort"] = option(
        "skip", "what to do when max_nonfinite steps in a row were not finite; each is skipped; "
        "rollback goes on from the newest checkpoint with the samples after those"
    )  # fmt: skip
    max_nonfinite: int = option(10, "steps in a row that may be not finite; seen at each log")
    compile: bool | None = switch("torch.compile the model (default: on CUDA only)")
    detect_anomaly: bool = option(False, "name the operation whose gradient is NaN; very slow")

    # --- what is seen and kept; intervals are in optimizer steps, 0 is never ---
    log_interval: int = option(50, "steps between log lines")
    eval_interval: int = option(500, "steps between evaluations, and one at the end")
    eval_steps: int = option(64, "batches of batch_size sequences in one evaluation")
    sample_interval: int = option(0, "steps between samples of generated text")
    save_interval: int = option(100, "steps between checkpoints, and one at the end")
    keep_checkpoints: int = option(3, "newest checkpoints to keep, besides the best one")
    keep_every: int = option(0, "steps between checkpoints that are never deleted")
    backup_to: str | None = option(
        None, "copy checkpoints and logs to this URL as well: file://, s3://, whatever fsspec knows"
    )
    backup_interval: int = option(1000, "steps between those copies, and one at the end")
    check_checkpoints: str | None = option(
        None, "only list the checkpoints of this run directory and whether they are whole"
    )
    verify_resume: int = option(
        0, "only test this configuration: train 2 K steps, then K, resume and K more, and compare "
        "every tensor", metavar="K"
    )  # fmt: skip
    estimate: bool = option(
        False, "only say what memory, communication and time this run will need; allocates nothing"
    )
    world_size: int = option(1, "devices, for --estimate alone (else torchrun's --nproc_per_node)")
    mfu: float = option(0.4, "share of the peak that --estimate counts with")
    cache_clear_interval: int = option(100, "steps between clearings of CUDA's allocator cache")
    monitor: Literal["off", "light", "full"] = option(
        "light", "off: loss and throughput; light: phases, memory, gradient norm, anomalies as "
        "well; full: norms and updates of each layer, entropy of the output as well"
    )  # fmt: skip
    health_interval: int | None = option(
        None, "steps between what only full measures (default: log_interval)"
    )
    memory_interval: int | None = option(None, "steps between memory rows (default: log_interval)")
    window_size: int = option(
        100, "newest steps, at most, in the median, the 95th percentile and what a spike is "
        "compared with"
    )  # fmt: skip
    verbose: bool = option(False, "show every phase in the log line")
    peak_tflops: float | None = option(None, "peak of the device for MFU, where it is not known")
    tensorboard: bool = option(True, "write TensorBoard event files")
    tensorboard_dir: str | None = option(None, "where they go (default: out_dir/tensorboard)")
    tensorboard_flush_secs: int = option(120, "seconds between flushes to the event file")
    wandb: bool = option(False, "mirror TensorBoard to Weights & Biases, where it is installed")


# --- filling it ------------------------------------------------------------------------------


def hf_argument_parser():
    """transformers.HfArgumentParser from its file: importing the whole package takes a second."""
    folder = importlib.util.find_spec("transformers").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("hf_argparser", f"{folder}/hf_argparser.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HfArgumentParser


def make_parser(options: type = None, prog="train.py", usage="[--option value ...]", about=None):
    """A parser of the fields of a dataclass, those of Config unless another is given."""

    class Parser(hf_argument_parser()):
        def error(self, message: str):
            raise ConfigError(message)

    class Formatter(ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action):
            told = action.default in (None, False, []) or "(default" in action.help
            return action.help if told else super()._get_help_string(action)

    parser = Parser(
        options or Config, prog=prog, usage=f"%(prog)s {usage}", allow_abbrev=False,
        formatter_class=Formatter, description=f"{about or 'Train a language model.'} In the "
        "names of options, dashes and underscores are the same.",
    )  # fmt: skip
    for f in dataclasses.fields(options or Config):
        if f.metadata.get("nargs") == "?":  # a switch: its --no_ form is not made for it
            forms = f"--no_{f.name}", f"--no-{f.name.replace('_', '-')}"
            parser.add_argument(*dict.fromkeys(forms), action="store_false", dest=f.name,
                                default=None)  # fmt: skip
    for action in parser._actions:
        if action.const is False:  # a --no_ form, which HfArgumentParser gives the help of its pair
            action.help = f"not --{action.dest}"
    return parser


def parse(argv: list[str], saved: str | None = None) -> Config:
    """The Config that `argv` asks for.

    saved: config.yaml of the run that is being continued; it stands in for the defaults.

    Raises ConfigError for an unknown, abbreviated or repeated-in-YAML name, a wrong type, or a
    file that cannot be read. Presets and YAML become flags before `argv`, so that the one parser
    checks them all and the last one wins.
    """
    parser = make_parser()
    given = read_flags(parser, argv)
    named = any(flag.split("=")[0] == "--model" for flag in argv)
    drop = {"head_dim", *MODELS["default"]} if named else set()  # the shape of a model in a file
    flags = yaml_flags(parser, saved, drop) if saved else []
    if given.preset:
        flags += [f"--{k}={v}" for k, v in PRESETS[given.preset].items()]
    if given.config:
        flags += yaml_flags(parser, given.config, drop)
    return Config(**vars(read_flags(parser, flags + argv)))


def read_flags(parser, argv: list[str]):
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        raise ConfigError(f"unknown argument {flag}{nearest(flag, parser._option_string_actions)}")
    return args


def nearest(name: str, names) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def yaml_flags(parser, path: str, drop: set[str]) -> list[str]:
    """The options in a YAML file as flags, checked one by one so that an error names its line.

    Those in `drop` are left out: a --model on the command line replaces the shape in the file.

    The text of a value is handed on as it was written, so YAML's own idea of a type (`1e-4` is
    text, `no` is False, 010 is 8) never comes into it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: {e}") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(e, 'problem', e)}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected lines of the form `name: value`")
    types, flags = {f.name: str(f.type) for f in dataclasses.fields(Config)}, {}
    for key, value in root.value:
        name, where = str(key.value), f"{path}:{key.start_mark.line + 1}"
        if name in ("preset", "config"):
            raise ConfigError(f"{where}: {name} is for the command line, not for a file")
        if name not in types:
            raise ConfigError(f"{where}: unknown option {name}{nearest(name, types)}")
        if name in flags:
            raise ConfigError(f"{where}: {name} is given twice")
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise ConfigError(f"{where}: {name} must be a value or a list of values")
        if not items or value.tag.endswith(":null"):
            flags[name] = []  # the same as not given
        elif isinstance(value, yaml.SequenceNode):
            flags[name] = [f"--{name}", *(item.value for item in items)]
        else:
            text = value.value
            if "bool" in types[name]:  # argparse knows yes and no, but not YAML's on and off
                text = {"on": "true", "off": "false"}.get(text.lower(), text)
            flags[name] = [f"--{name}={text}"]
        try:
            read_flags(parser, flags[name])
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from None
    return [flag for name in flags if name not in drop for flag in flags[name]]


def write_yaml(cfg: Config, path: str, notes: dict[str, str]):
    """Write `cfg` so that --config reads it back, under the notes as comments.

    What says where a run starts is a matter of one command and not written.
    """
    values = dataclasses.asdict(cfg)
    for name in ("config", "preset", "out_dir", "overwrite", "auto_resume", "resume",
                 "allow_change", "check_checkpoints", "verify_resume", "eval_only",
                 "trust_remote_code"):  # fmt: skip
        del values[name]
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"# {k}: {v}\n" for k, v in notes.items())
        yaml.safe_dump(values, file, sort_keys=False, width=100)


# --- checking it -----------------------------------------------------------------------------


def resolve(cfg: Config) -> Config:
    """Fill in what --model decides, check everything that needs no data and no device.

    What depends on the machine (device, precision, compile, workers, micro-batch) is left as it
    was asked for, so that a run can be continued on another one. Raises ConfigError.
    """
    shape = SHAPE_DEFAULTS | MODELS.get(cfg.model, {})  # of transformers: set by --init_from
    cfg = dataclasses.replace(
        cfg, **{name: value for name, value in shape.items() if getattr(cfg, name) is None}
    )
    if cfg.model == "transformers" and not cfg.init_from:
        raise ConfigError("--model transformers: expected --init_from with it")
    if cfg.warmup_steps is None:
        cfg.warmup_steps = round(0.02 * cfg.max_steps)
    if cfg.head_dim is None and cfg.n_head > 0 and cfg.d_model % cfg.n_head == 0:
        cfg.head_dim = cfg.d_model // cfg.n_head

    def need(ok: bool, name: str, expected: str):
        if not ok:
            raise ConfigError(f"--{name} {getattr(cfg, name)}: expected {expected}")

    for name in ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "seq_len",
                 "max_steps", "batch_size", "eval_steps", "keep_checkpoints", "max_nonfinite",
                 "prefetch_factor", "tensorboard_flush_secs", "window_size",
                 "backup_interval", "world_size"):  # fmt: skip
        need(getattr(cfg, name) is None or getattr(cfg, name) >= 1, name, "at least 1")
    for name in ("log_interval", "eval_interval", "sample_interval", "save_interval", "grad_clip",
                 "cache_clear_interval", "warmup_steps", "weight_decay", "min_learning_rate",
                 "seed", "health_interval", "memory_interval", "keep_every",
                 "verify_resume", "group_window"):  # fmt: skip
        need(getattr(cfg, name) is None or getattr(cfg, name) >= 0, name, "at least 0")
    need(cfg.world_size == 1 or cfg.estimate, "world_size", "--estimate with it; to train on "
         "several, torchrun --nproc_per_node")  # fmt: skip
    need(0 < cfg.mfu <= 1, "mfu", "more than 0, at most 1")
    for name in ("dropout", "beta1", "beta2"):
        need(0 <= getattr(cfg, name) < 1, name, "at least 0 and below 1")
    for name in ("learning_rate", "norm_eps", "rope_theta"):
        need(0 < getattr(cfg, name) < float("inf"), name, "more than 0")
    need(cfg.head_dim is not None, "n_head", f"a divisor of d_model {cfg.d_model}, or --head_dim")
    need(cfg.head_dim >= 2 and cfg.head_dim % 2 == 0, "head_dim",
         "an even number, for the rotary embedding")  # fmt: skip
    need(cfg.n_head % cfg.n_kv_head == 0, "n_kv_head", f"a divisor of n_head {cfg.n_head}")
    need(len(cfg.rope_scaling) in (0, 1, 4), "rope_scaling", "one number, or four")
    need(cfg.min_learning_rate <= cfg.learning_rate, "min_learning_rate",
         f"at most learning_rate {cfg.learning_rate}")  # fmt: skip
    need(cfg.warmup_steps <= cfg.max_steps, "warmup_steps", f"at most max_steps {cfg.max_steps}")
    need(0 <= cfg.decay_fraction <= 1, "decay_fraction", "between 0 and 1")
    micro = cfg.micro_batch_size
    need(micro in (None, "auto") or micro.isdigit() and int(micro) > 0, "micro_batch_size",
         "a number of at least 1, or auto")  # fmt: skip
    need(cfg.num_workers == "auto" or cfg.num_workers.isdigit(), "num_workers", "a number or auto")
    need(cfg.peak_tflops is None or cfg.peak_tflops > 0, "peak_tflops", "more than 0")
    need(cfg.seed < 2**63, "seed", "below 2^63")
    need(cfg.data_mode != "stream" or not cfg.packing, "data_mode", "documents, for --packing")
    if cfg.wandb and not importlib.util.find_spec("wandb"):
        raise ConfigError("--wandb: not installed; pip install wandb")
    need(cfg.tensorboard or not cfg.wandb, "wandb", "TensorBoard files, which it mirrors")
    if cfg.eval_only and not (cfg.resume or cfg.auto_resume or cfg.init_from):
        raise ConfigError("--eval_only: expected the weights to evaluate: --resume or --init_from")
    if cfg.resume and (cfg.auto_resume or cfg.overwrite) or cfg.auto_resume and cfg.overwrite:
        raise ConfigError("--resume, --auto_resume and --overwrite exclude one another")
    return cfg


def micro_batch_size(cfg: Config, world_size: int, most: int | None = None) -> int:
    """Sequences per device and forward pass, so that whole micro-batches make up a batch.

    most: where it is left to us, the largest that may be; 16,384 tokens otherwise. Raises
    ConfigError with the nearest sizes that do where the one asked for does not.
    """
    per_rank, rest = divmod(cfg.batch_size, world_size)
    given = cfg.micro_batch_size not in (None, "auto")
    if not given and not rest:
        limit = most or max(1, 16384 // cfg.seq_len)
        return max(m for m in range(1, min(per_rank, limit) + 1) if per_rank % m == 0)
    unit = world_size * (int(cfg.micro_batch_size) if given else 1)
    if cfg.batch_size % unit:
        below = cfg.batch_size // unit * unit
        nearest_sizes = f"{below} or {below + unit}" if below else str(unit)
        micro = f" of --micro_batch_size {cfg.micro_batch_size}" if given else ""
        raise ConfigError(
            f"--batch_size {cfg.batch_size}: expected a multiple of {unit} ({world_size} "
            f"process{'es' * (world_size > 1)}{micro}); the nearest is {nearest_sizes}"
        )
    return int(cfg.micro_batch_size)
