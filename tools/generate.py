"""python model.py generate|export: text from a model, and its weights in Hugging Face's format."""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from config import Config
from model import Transformer, generate, rope_table
from steady import huggingface, lora
from steady.checkpoint import is_checkpoint, latest_valid, require_valid, run_dir_of
from steady.checkpoint import read_state as read_checkpoint
from steady.cli import ConfigError, check_bounds, make_parser, option, read_flags, run_command
from steady.device import DTYPES, pick_device
from steady.parallel import Shards
from steady.tokens import byte_tokenizer, end_of_text_ids, load_tokenizer

USAGE = """generate RUN_DIR_OR_CHECKPOINT_OR_FOLDER --prompt TEXT [--option value ...]
       model.py export RUN_DIR_OR_CHECKPOINT OUT_DIR [--dtype bf16]"""
ABOUT = "Generate text with a model, or export it to Hugging Face's format."


@dataclass
class GenerateOptions:
    prompt: list[str] = option(
        ["\n"], "text to continue; several are taken one after another (default: a line end)")
    max_new_tokens: int = option(200, "tokens to write, at most", at_least=1)
    temperature: float = option(
        0.8, "0 takes the likeliest token, 1 samples from the model's distribution", at_least=0)
    top_k: int = option(50, "sample from this many likeliest tokens; 0 is all", at_least=0)
    top_p: float = option(
        1.0, "sample from the fewest tokens whose probabilities reach this", above=0, at_most=1)
    seed: int = option(0, "sampling seed", at_least=0)
    n: int = option(1, "answers to each prompt, written together", at_least=1)
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = option("auto", "where to compute")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


@dataclass
class ExportOptions:
    dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "dtype of the weights in the files")
    adapter: bool = option(
        False, "write what --lora_rank trained, as peft loads it, and not its sum with the base")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return run_command("model.py", generate_or_export, argv)


def generate_or_export(argv: list[str]):
    exports = argv[:1] == ["export"]
    kind = ExportOptions if exports else GenerateOptions
    parser = make_parser(kind, "model.py", USAGE, ABOUT)
    parser.add_argument("command", choices=("generate", "export"))
    parser.add_argument("source", help="run directory, checkpoint or Hugging Face folder")
    if exports:
        parser.add_argument("out", help="folder to make")
    given = vars(read_flags(parser, argv))
    del given["command"]
    source = Path(given.pop("source"))
    if exports:
        out = Path(given.pop("out"))
        given["dtype"] = DTYPES[given["dtype"]]
        print(export(source, out, **given))
    else:
        options = GenerateOptions(**given)
        check_bounds(options)
        write_text(source, options)


# --- text from a model -----------------------------------------------------------------------


def write_text(source: Path, options: GenerateOptions):
    """Continue the prompts with the model of a run, a checkpoint or a Hugging Face folder."""
    device = pick_device(options.device, 0)
    model, tokenizer = open_model(source, options.max_new_tokens, options.trust_remote_code)
    stop = stop_ids(source, tokenizer)
    model.to(device).eval()
    torch.manual_seed(options.seed)
    for prompt in options.prompt:
        if options.chat:
            if not tokenizer.chat_template:
                raise ConfigError(f"--chat: the tokenizer of {source} has no chat template")
            prompt = tokenizer.apply_chat_template(
                [dict(role="user", content=prompt)], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(prompt, add_special_tokens=not options.chat)["input_ids"]
        ids = ids or [tokenizer.eos_token_id]
        if ids == [None]:
            raise ConfigError("--prompt: expected text: the tokenizer has no end-of-text to begin "
                              "with")
        context = widen(model, len(ids) + options.max_new_tokens)
        # a context that is too full is cut to its newer half, as in `generate`
        if len(ids) > context or len(ids) == context and not isinstance(model, Transformer):
            seen = context // 2 if isinstance(model, huggingface.HFModel) else (context + 1) // 2
            print(f"warning: the prompt has {len(ids):,} tokens, the model sees {context:,} at "
                  f"most: it continues the last {seen:,}, without the first {len(ids) - seen:,}",
                  file=sys.stderr, flush=True)
        tokens = torch.tensor([ids] * options.n, device=device)
        answer(model, tokenizer, prompt, tokens, stop, options)


def widen(model, length: int) -> int:
    """Let our Transformer see `length` tokens at once, as far as it has learned to.

    Returns how many tokens the model sees at once.
    """
    if not isinstance(model, Transformer):
        return model.context()
    wanted = min(length, model.cfg.max_position or 0)
    if wanted > model.cfg.seq_len:
        model.cfg = replace(model.cfg, seq_len=wanted)
        cos, sin = rope_table(model.cfg)
        model.cos, model.sin = cos.to(model.cos.device), sin.to(model.sin.device)
    return model.cfg.seq_len


def stop_ids(source: Path, tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's end-of-text, and those of the model's files."""
    folder = source
    if is_run(source):
        run_dir = run_dir_of(source) if is_checkpoint(source) else source
        folder = run_dir and run_dir / huggingface.KEPT
    else:
        folder = huggingface.fetch(str(source))
    ids = [tokenizer.eos_token_id, *(end_of_text_ids(folder) if folder else [])]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def is_run(source: Path) -> bool:
    """Whether it is a run or a checkpoint, and not a Hugging Face folder or name."""
    theirs = (source / "config.json").exists() or lora.is_adapter_folder(source)
    return source.exists() and not (source.is_dir() and theirs)


def answer(model, tokenizer, prompt: str, tokens: torch.Tensor, stop: tuple[int, ...],
           options: GenerateOptions):
    """Print the continuation of tokens [n, T]: as it is written, or for several when it is done."""
    written, shown, alone = [], 0, options.n == 1
    shown_prompt = "" if options.chat else prompt
    before, text_before = end_of_prompt(tokenizer, tokens[0].tolist())

    def text_of(ids: list[int]) -> str:
        end = next((i for i, token in enumerate(ids) if token in stop), len(ids))
        text = tokenizer.decode(before + ids[:end], skip_special_tokens=True)
        return text[len(text_before) :]

    def stream(new: torch.Tensor):
        nonlocal shown
        written.append(int(new[0]))
        text = text_of(written)
        if not text.endswith("\ufffd"):  # otherwise inside a character
            print(text[shown:], end="", flush=True)
            shown = len(text)

    if alone:
        print(shown_prompt, end="", flush=True)
    out = generate(model, tokens, options.max_new_tokens, options.temperature, options.top_k,
                   options.top_p, stop, stream if alone else None)
    texts = [text_of(row) for row in out[:, tokens.shape[1] :].tolist()]
    if alone:
        print(texts[0][shown:])
    else:
        for i, text in enumerate(texts, start=1):
            print(f"--- {i} of {options.n}\n{shown_prompt}{text}")


def end_of_prompt(tokenizer, ids: list[int]) -> tuple[list[int], str]:
    """The last ids of a prompt that have a text by themselves, and the text.

    Answers are decoded behind them, since SentencePiece's decoders drop a space at the beginning.
    """
    most = min(32, len(ids))
    for n in range(1, most + 1):
        text = tokenizer.decode(ids[-n:], skip_special_tokens=True)
        if text and "\ufffd" not in text:  # which would be the middle of a character
            return ids[-n:], text
    return [], ""


def open_model(source: Path, length: int, trust_remote_code: bool = False):
    """(model, tokenizer of transformers) of a run, a checkpoint, or a Hugging Face folder.

    length: the context wanted, as far as the model allows it. Raises ConfigError.
    """
    if not is_run(source):
        cfg = Config(init_from=str(source), trust_remote_code=trust_remote_code)
        cfg = huggingface.config_from_hf(cfg)
        folder = huggingface.tokenizer_folder(str(source))
        if cfg.model == "transformers":
            model = huggingface.HFModel(cfg)
        else:
            model = Transformer(replace(cfg, seq_len=min(cfg.max_position, length)))
            huggingface.load_initial(model, str(source), Shards())
        return model, load_tokenizer(str(folder), needs_end=False)
    state, run_dir, path = read_state(source)
    cfg = config_of(state, trust_remote_code)
    if cfg.max_position:  # learned before this run
        cfg.seq_len = min(cfg.max_position, max(cfg.seq_len, length))
    model = model_of(state, cfg, path)
    if state["tokenizer"] == "bytes":
        return model, byte_tokenizer()
    if not run_dir or not (run_dir / "tokenizer").is_dir():
        raise ConfigError(f"{path}: its run has no tokenizer, only token ids")
    return model, load_tokenizer(str(run_dir / "tokenizer"), needs_end=False)


def model_of(state: dict, cfg: Config, path: Path):
    """The model of a checkpoint, with its adapters merged if it has any. Raises ConfigError."""
    foreign, adapted = cfg.model == "transformers", cfg.lora_rank > 0
    model = huggingface.HFModel(cfg, None if adapted else path) if foreign else Transformer(cfg)
    if not adapted:
        model.load_state_dict(state["model"])
    elif foreign:
        huggingface.merge_checkpoint(model, state, path, Shards())
    else:
        huggingface.load_initial(model, str(path), Shards())
    return model


def read_state(source: Path) -> tuple[dict, Path | None, Path]:
    """(contents of a checkpoint, the directory of its run, its path), of a run or a file.

    Raises ConfigError if there is no valid one.
    """
    path = source
    if is_checkpoint(source) or source.is_file():
        require_valid(source)
    elif source.is_dir():
        path = latest_valid(source / "checkpoints")
        if path is None:
            raise ConfigError(f"{source}: expected a checkpoint or a config.json in it")
    else:
        raise ConfigError(f"{source}: no such file or folder")
    return read_checkpoint(path), run_dir_of(path), path


def config_of(state: dict, trust_remote_code: bool) -> Config:
    """The options of a checkpoint, which has no say in what code may run here."""
    known = Config.__dataclass_fields__
    cfg = Config(**{name: value for name, value in state["config"].items() if name in known})
    return replace(cfg, trust_remote_code=trust_remote_code)


# --- export ----------------------------------------------------------------------------------


def export(source: Path, out: Path, dtype: torch.dtype, trust_remote_code: bool = False,
           adapter: bool = False) -> str:
    """Write a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer load.

    adapter: only what --lora_rank trained, as peft loads it. Raises ConfigError if the checkpoint
    is damaged, has non-finite weights, or no adapter.
    """
    state, run_dir, path = read_state(source)
    cfg = config_of(state, trust_remote_code)
    bad = [n for n, t in state["model"].items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        raise ConfigError(f"{path}: non-finite weights, first in {bad[0]}; not exported")
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another folder")
    if adapter and not cfg.lora_rank:
        raise ConfigError(f"{path}: --adapter: it was trained without --lora_rank")
    if cfg.qk_norm and cfg.qkv_bias:
        raise ConfigError(f"{path}: no Hugging Face model has both --qk_norm and "
                          "--qkv_bias; not exported")
    out.mkdir(parents=True, exist_ok=True)
    if adapter:
        model = huggingface.HFModel(cfg) if cfg.model == "transformers" else Transformer(cfg)
        parts = huggingface.linear_parts(model)
        lora.save(out, lora.pairs_of(state["model"], parts, cfg), cfg, dtype)
    elif cfg.model == "transformers":
        model = model_of(state, cfg, path)
        model.module.to(dtype).save_pretrained(out, max_shard_size="5GB")
    else:
        listed = end_of_text_ids(run_dir / huggingface.KEPT) if run_dir else []
        ends = dict.fromkeys((state.get("end_of_text"), *listed))
        ends = [i for i in ends if i is not None and i < cfg.vocab_size]
        weights = model_of(state, cfg, path).state_dict() if cfg.lora_rank else state["model"]
        huggingface.save_weights(weights, cfg, out, dtype, ends)
    tokenizer = export_tokenizer(state["tokenizer"], run_dir, out)
    return f"{path} at step {state['step']} to {out}: {tokenizer}"


def export_tokenizer(name: str | None, run_dir: Path | None, out: Path) -> str:
    if name == "bytes":
        byte_tokenizer().save_pretrained(out)
    elif run_dir and (run_dir / "tokenizer").is_dir():
        shutil.copytree(run_dir / "tokenizer", out, dirs_exist_ok=True)
    else:
        return "without a tokenizer, as the run has none"
    return f"with the tokenizer {name}"
