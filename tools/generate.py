"""python model.py generate|chat|export: text from a model; its weights in Hugging Face's format."""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from config import Config
from model import Transformer, generate
from steady.checkpoints.checkpoint import Checkpoint, averaged, find_checkpoint
from steady.checkpoints.disk import disk_error
from steady.guard.process import run_command
from steady.models import foreign, huggingface, lora
from steady.models.device import DTYPES, pick_device
from steady.options import ConfigError, check_bounds, make_parser, option, read_flags
from steady.ranks.parallel import Shards
from steady.tokens.tokenizers import (
    byte_tokenizer,
    end_of_text_ids,
    load_tokenizer,
    read_json,
    serve_version_4,
    text_start,
)
from tools.chat import apply, end_of_turn
from tools.talk import Answer, talk

USAGE = """generate RUN_DIR_OR_CHECKPOINT_OR_FOLDER --prompt TEXT [--option value ...]
       model.py chat RUN_DIR_OR_CHECKPOINT_OR_FOLDER [--option value ...]
       model.py export RUN_DIR_OR_CHECKPOINT OUT_DIR [--dtype bf16]"""
ABOUT = "Generate text with a model, talk to it, or export it to Hugging Face's format."
SAMPLING = dict(temperature=0.8, top_k=50, top_p=1.0)  # defaults of the defaults


@dataclass
class SamplingOptions:
    max_new_tokens: int = option(200, "tokens to write, at most", at_least=1)
    temperature: float | None = option(
        None, "0 takes the likeliest token, 1 samples from the model's distribution (default of "
        "this and the next two: the model's generation_config.json, or 0.8, 50 and 1)", at_least=0,
        at_most=10**6)
    top_k: int | None = option(None, "sample from this many likeliest tokens; 0 is all", at_least=0)
    top_p: float | None = option(
        None, "sample from the fewest tokens whose probabilities reach this", above=0, at_most=1)
    seed: int = option(0, "sampling seed", at_least=0)
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "where to compute")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


@dataclass
class GenerateOptions(SamplingOptions):
    prompt: list[str] = option(
        [], "one or several texts to continue (default: a line end)", may_be_empty=True)
    prompt_file: str | None = option(None, "each line of this file is a prompt, too")
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")


@dataclass
class ChatOptions(SamplingOptions):
    max_new_tokens: int = option(1000, "tokens of an answer, at most", at_least=1)
    system: str = option("", "system prompt", may_be_empty=True)


@dataclass
class ExportOptions:
    dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "dtype of the weights in the files")
    adapter: bool = option(False, "write only the adapters of --lora_rank, in peft's format")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


COMMANDS = dict(generate=GenerateOptions, chat=ChatOptions, export=ExportOptions)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return run_command("model.py", run, argv)


def run(argv: list[str]):
    kind = COMMANDS.get(argv[0] if argv else None, GenerateOptions)
    parser = make_parser(kind, "model.py", USAGE, ABOUT)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("source", help="run directory, checkpoint or Hugging Face folder")
    if kind is ExportOptions:
        parser.add_argument("out", help="folder to make")
    given = vars(read_flags(parser, argv))
    command, source = given.pop("command"), Path(given.pop("source"))
    if command == "export":
        given |= dict(out=Path(given["out"]), dtype=DTYPES[given["dtype"]])
        print(export(source, **given))
        return
    options = kind(**given)
    check_bounds(options)
    writer, chats = Writer(source, options), command == "chat"
    if (chats or options.chat) and not writer.tokenizer.chat_template:
        raise ConfigError(f"{source}: its tokenizer has no chat template; generate continues text")
    if chats:
        talk(writer, options.system)
    else:
        write_text(writer, options)


# --- text from a model -----------------------------------------------------------------------


class Writer:
    """A model (of a run, a checkpoint or a Hugging Face folder) with its sampling options."""

    def __init__(self, source: Path, options: SamplingOptions):
        self.source, self.max_new_tokens = source, options.max_new_tokens
        self.device = pick_device(options.device, 0)
        self.model, self.tokenizer, folder = open_model(source, options.trust_remote_code)
        self.stop = tuple(ends_of(self.tokenizer, folder))
        given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
        self.sampling = SAMPLING | usual_sampling(folder) | given
        self.model.to(self.device).eval()
        torch.manual_seed(options.seed)

    def chat_ids(self, messages: list[dict]) -> list[int]:
        """The ids of a conversation, up to the start of the answer. Raises ConfigError."""
        try:
            text = apply(self.tokenizer, messages, None, add_generation_prompt=True)
        except (ValueError, TypeError, LookupError) as e:
            raise ConfigError(f"{self.source}: {e}") from None
        return self.ids(text, [])

    def ids(self, text: str, start: list[int]) -> list[int]:
        """The ids of a text after `start`, as data.py writes them; at least one."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids if ids[: len(start)] == start else start + ids
        return ids or [self.tokenizer.eos_token_id or 0]

    def context(self) -> int:
        """The most tokens the model sees at once."""
        ours = isinstance(self.model, Transformer)
        return self.model.cfg.seq_len if ours else self.model.context()

    def write(self, ids: list[int], on_token):
        """Continue a prompt; on_token is called with each new id."""
        if len(ids) >= self.context():  # `generate` keeps its newer half
            print(f"warning: the prompt has {len(ids):,} tokens, the model sees "
                  f"{self.context():,} at most: its beginning is left out",
                  file=sys.stderr, flush=True)
        generate(self.model, torch.tensor([ids], device=self.device), self.max_new_tokens,
                 **self.sampling, stop=self.stop, on_token=lambda new: on_token(int(new[0])))


def write_text(writer: Writer, options: GenerateOptions):
    """Continue all prompts, one after another. Raises ConfigError."""
    prompts = options.prompt
    if options.prompt_file:
        try:
            text = Path(options.prompt_file).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--prompt_file {options.prompt_file}: {e}") from None
        prompts = prompts + text.removesuffix("\n").split("\n")
    prompts = prompts or ["\n"]
    for i, prompt in enumerate(prompts, 1):
        if options.chat:
            ids = writer.chat_ids([dict(role="user", content=prompt)])
        else:
            ids = writer.ids(prompt, text_start(writer.tokenizer))
        if len(prompts) > 1:
            print(f"--- {i} of {len(prompts)}")
        print("" if options.chat else prompt, end="", flush=True)
        Answer(writer, ids).write()


def ends_of(tokenizer, folder: Path | None) -> list[int]:
    """All ids that end an answer: of the tokenizer, its chat template and the model's files."""
    ends = end_of_text_ids(folder) if folder else []
    if tokenizer:
        ends = [tokenizer.eos_token_id, *ends, end_of_turn(tokenizer)]
    return list(dict.fromkeys(i for i in ends if i is not None))


def usual_sampling(folder: Path | None) -> dict[str, float]:
    """SAMPLING in the generation_config.json of a model; {} if a value is out of bounds."""
    found = read_json(folder / "generation_config.json") if folder else {}
    if found.get("do_sample") is False:
        return dict(temperature=0)
    try:
        usual = {name: type(default)(found[name]) for name, default in SAMPLING.items()
                 if found.get(name) is not None}
        check_bounds(SamplingOptions(**usual))
    except (ValueError, TypeError, OverflowError, ConfigError):
        return {}
    return usual


def open_model(source: Path, trust_remote_code: bool = False):
    """(model, tokenizer, folder) of a run, a checkpoint, or a Hugging Face folder.

    folder: the model's own files, of a run those of --init_from, or None. Raises ConfigError.
    """
    if not is_run(source):
        cfg = Config(init_from=str(source), trust_remote_code=trust_remote_code)
        cfg = huggingface.config_from_hf(cfg)
        cfg.seq_len = cfg.max_position
        folder = huggingface.tokenizer_folder(str(source))
        return base_of(cfg), load_tokenizer(str(folder), needs_end=False), source_folder(cfg)
    checkpoint, state, cfg = open_checkpoint(source, trust_remote_code)
    cfg.seq_len = cfg.max_position or cfg.seq_len  # the base may have seen longer texts
    tokenizer = tokenizer_of(state, checkpoint.run_dir)
    if not tokenizer:
        raise ConfigError(f"{checkpoint}: its run has no tokenizer, only token ids")
    return model_of(state, cfg), tokenizer, source_folder(cfg)


def is_run(source: Path) -> bool:
    """Whether it is a run or a checkpoint, not a Hugging Face folder or name."""
    theirs = (source / "config.json").exists() or lora.is_adapter_folder(source)
    return source.exists() and not (source.is_dir() and theirs)


def open_checkpoint(source: Path, trust_remote_code: bool) -> tuple[Checkpoint, dict, Config]:
    """The checkpoint, verified, of a run or a file; its state and options. Raises ConfigError."""
    checkpoint = find_checkpoint(source)
    if not checkpoint:
        expected = "a checkpoint or a config.json in it" if source.is_dir() else "a file or folder"
        raise ConfigError(f"{source}: expected {expected}")
    state, known = averaged(checkpoint.state()), Config.__dataclass_fields__
    cfg = Config(**{name: value for name, value in state["config"].items() if name in known})
    return checkpoint, state, replace(cfg, trust_remote_code=trust_remote_code)


def source_folder(cfg: Config) -> Path | None:
    """The folder of --init_from, if there is any; a note if it is gone."""
    if not cfg.init_from:
        return None
    try:
        return huggingface.folders(cfg.init_from, cfg.trust_remote_code, weights=False)[-1]
    except ConfigError as e:
        print(f"note: without the configuration of --init_from: {e}", file=sys.stderr)
        return None


def tokenizer_of(state: dict, run_dir: Path | None):
    """The tokenizer of a checkpoint in a run directory; None if there is none."""
    if state["tokenizer"] == "bytes":
        return byte_tokenizer()
    folder = run_dir and run_dir / "tokenizer"
    return load_tokenizer(str(folder), needs_end=False) if folder and folder.is_dir() else None


def base_of(cfg: Config):
    """The model that --init_from names."""
    if cfg.model == "transformers":
        return foreign.HFModel(cfg)
    model = Transformer(cfg)
    huggingface.load_initial(model, cfg.init_from, Shards())
    return model


def model_of(state: dict, cfg: Config):
    """The model of a checkpoint, with its adapters merged if it has any. Raises ConfigError."""
    if cfg.lora_rank:
        model = base_of(cfg)
        huggingface.merge_checkpoint(model, state, cfg)
        return model
    model = foreign.HFModel(cfg) if cfg.model == "transformers" else Transformer(cfg)
    model.load_state_dict(state["model"])
    return model


# --- export ----------------------------------------------------------------------------------


def export(source: Path, out: Path, dtype: torch.dtype, trust_remote_code: bool = False,
           adapter: bool = False) -> str:
    """Write a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer load.

    adapter: write only the adapters of --lora_rank, in peft's format. Raises ConfigError.
    """
    from safetensors import SafetensorError

    checkpoint, state, cfg = open_checkpoint(source, trust_remote_code)
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another folder")
    if adapter and not cfg.lora_rank:
        raise ConfigError(f"{checkpoint}: --adapter: it was trained without --lora_rank")
    if cfg.qk_norm and cfg.qkv_bias:
        raise ConfigError(f"{checkpoint}: no Hugging Face model has both --qk_norm and "
                          "--qkv_bias; not exported")
    is_foreign, weights = cfg.model == "transformers", state["model"]
    if adapter:
        with torch.device("cpu" if is_foreign else "meta"):  # for the names of its layers
            model = foreign.HFModel(cfg) if is_foreign else Transformer(cfg)
    elif is_foreign or cfg.lora_rank:
        model = model_of(state, cfg)
        weights = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ConfigError(f"{checkpoint}: non-finite weights in {name}; not exported")
        if not tensor.to(dtype).isfinite().all():
            raise ConfigError(f"{checkpoint}: weights in {name} are too large for this --dtype; "
                              "choose bf16 or fp32")
    folder, tokenizer = source_folder(cfg), tokenizer_of(state, checkpoint.run_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not tokenizer:
            print("note: without a tokenizer, as the run has none", file=sys.stderr)
        elif state["tokenizer"] == "bytes":
            tokenizer.save_pretrained(out)
            serve_version_4(out)
        else:
            shutil.copytree(checkpoint.run_dir / "tokenizer", out, dirs_exist_ok=True)
            serve_version_4(out)
        if adapter:
            pairs = lora.pairs_of(weights, huggingface.linear_parts(model), cfg)
            lora.save(out, pairs, cfg, dtype)
        else:
            if is_foreign:
                model.save(out, dtype)
            else:
                huggingface.save_weights(weights, cfg, out, dtype)
            ends = dict.fromkeys([state.get("end_of_text"), *ends_of(tokenizer, folder)])
            ends = [i for i in ends if i is not None and i < cfg.vocab_size]
            huggingface.save_config(cfg, folder, out, dtype, ends)
            if tokenizer and not trust_remote_code:  # transformers would ask whether to run it
                load_tokenizer(str(out), needs_end=False)  # prints a note if it loads differently
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"{out}: could not be written: {disk_error(e, out.parent)}; delete it, "
                          "and export again") from None
    return f"{checkpoint} at step {state['step']} to {out}"
