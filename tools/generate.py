"""python model.py generate|chat|eval|export: a model's text, its scores, its weights for others."""

import io
import json
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from config import Config
from model import Transformer, generate
from steady.checkpoints.checkpoint import Checkpoint, find_checkpoint
from steady.checkpoints.disk import disk_error
from steady.guard.process import run_command
from steady.models import foreign, huggingface, lora
from steady.models.device import DTYPES, pick_device
from steady.options import ConfigError, check_bounds, make_parser, option, read_flags
from steady.ranks.parallel import Shards
from steady.tokens import tokenizers
from tools.chat import apply, end_of_turn

USAGE = """generate RUN_DIR_OR_CHECKPOINT_OR_FOLDER --prompt TEXT [--option value ...]
       model.py chat RUN_DIR_OR_CHECKPOINT_OR_FOLDER [--option value ...]
       model.py eval RUN_DIR_OR_CHECKPOINT_OR_FOLDER --tasks TASK [TASK ...]
       model.py export RUN_DIR_OR_CHECKPOINT OUT_DIR [--dtype bf16]"""
ABOUT = "Generate text with a model, talk to it, score it, or export it to Hugging Face's format."
SAMPLING = dict(temperature=0.8, top_k=50, top_p=1.0)  # if the model's files have none
HELP = "/system TEXT, /reset; Ctrl-C stops an answer, Ctrl-D quits"


@dataclass
class ModelOptions:
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "where to compute")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


@dataclass
class SamplingOptions(ModelOptions):
    max_new_tokens: int = option(200, "tokens to write, at most", at_least=1)
    temperature: float | None = option(
        None, "0 takes the likeliest token (default of this and the next two: the model's "
        "generation_config.json, or 0.8, 50 and 1)", at_least=0, at_most=10**6)
    top_k: int | None = option(None, "sample from this many likeliest tokens; 0 is all", at_least=0)
    top_p: float | None = option(None, "sample from this share of probability", above=0, at_most=1)
    seed: int = option(0, "sampling seed", at_least=0)


@dataclass
class GenerateOptions(SamplingOptions):
    prompt: list[str] = option([], "texts to continue (default: a line end)", may_be_empty=True)
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")


@dataclass
class ChatOptions(SamplingOptions):
    max_new_tokens: int = option(1000, "tokens of an answer, at most", at_least=1)
    system: str = option("", "system prompt", may_be_empty=True)


@dataclass
class EvalOptions(ModelOptions):
    tasks: list[str] = option([], "tasks of lm-evaluation-harness, your own files or folders")
    num_fewshot: int | None = option(None, "examples in a prompt (default: the task's)", at_least=0)
    limit: int | None = option(None, "documents of each task, at most", at_least=1)
    batch_size: int = option(8, "requests computed together", at_least=1)
    json: bool = option(False, "print the scores as JSON")


@dataclass
class ExportOptions:
    dtype: Literal["fp32", "bf16", "fp16"] = option("fp32", "dtype of the weights in the files")
    adapter: bool = option(False, "write only the adapters of --lora_rank, in peft's format")
    trust_remote_code: bool = option(False, "run the code that comes with a model of the hub")


COMMANDS = dict(generate=GenerateOptions, chat=ChatOptions, eval=EvalOptions, export=ExportOptions)


def main(argv: list[str]) -> int:
    return run_command("model.py", run, argv)


def run(argv: list[str]):
    kind = COMMANDS.get(argv[0] if argv else None, GenerateOptions)
    parser = make_parser(kind, "model.py", USAGE, ABOUT)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("source", type=Path, help="run, checkpoint or Hugging Face folder")
    if kind is ExportOptions:
        parser.add_argument("out", type=Path, help="folder to make")
    given = vars(read_flags(parser, argv))
    command, source, out = given.pop("command"), given.pop("source"), given.pop("out", None)
    options = kind(**given)
    check_bounds(options)
    if command == "export":
        print(export(source, out, options))
    elif command == "eval":
        print(evaluate(source, options))
    else:
        writer = Writer(source, options)
        if (command == "chat" or options.chat) and not writer.tokenizer.chat_template:
            raise ConfigError(f"{source}: has no chat template; generate continues text")
        torch.manual_seed(options.seed)
        talk(writer, options) if command == "chat" else write_text(writer, options)


class Writer:
    """A model (of a run, a checkpoint or a Hugging Face folder) and how to sample from it."""

    def __init__(self, source: Path, options: ModelOptions):
        self.source, self.options = source, options
        self.device = pick_device(options.device, 0)
        self.model, self.tokenizer, folder = open_model(source, options.trust_remote_code)
        self.tokenizer.clean_up_tokenization_spaces = False  # it would change text once printed
        self.model.to(self.device).eval()
        self.context = self.model.cfg.seq_len  # in tokens
        self.stop = tuple(ends_of(self.tokenizer, folder))
        self.sampling = SAMPLING | usual_sampling(folder) | {
            name: x for name, x in vars(options).items() if name in SAMPLING and x is not None}

    def chat_ids(self, history: list[dict], system: str = "") -> list[int]:
        """Ids up to the answer; drops the oldest turns to make room. Raises ConfigError."""
        room = min(self.options.max_new_tokens, self.context // 2)
        first = [dict(role="system", content=system)] if system else []
        while True:
            try:
                text = apply(self.tokenizer, first + history, {}, add_generation_prompt=True)
            except (ValueError, TypeError, LookupError) as e:
                raise ConfigError(f"{self.source}: {e}") from None
            ids = self.ids(text, [])
            if len(history) == 1 or len(ids) + room <= self.context:
                return ids
            del history[:2]
            print("note: dropped the oldest question to make room", file=sys.stderr)

    def ids(self, text: str, start: list[int]) -> list[int]:
        """Ids of a text after `start`, as data.py writes them; at least one. Raises ConfigError."""
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # of a terminal
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids if ids[: len(start)] == start else start + ids
        if (top := max(ids, default=0)) >= self.model.cfg.vocab_size:
            raise ConfigError(f"{self.source}: has no token {top}, {self.tokenizer.decode(top)!r}")
        return ids or [self.tokenizer.eos_token_id or 0]

    def write(self, prompt: list[int]):
        """Continue a prompt: print complete characters as they come, and keep them in self.text."""
        if len(prompt) >= self.context:  # `generate` keeps its newer half
            print(f"warning: the prompt has {len(prompt):,} tokens, the model sees "
                  f"{self.context:,} at most: its beginning is left out", file=sys.stderr)
        # decoded after the prompt: SentencePiece's decoders drop a space at the beginning
        self.text, self.printed, self.new = "", prompt[-32:], []  # text; token ids
        try:
            generate(self.model, torch.tensor([prompt], device=self.device),
                     self.options.max_new_tokens, **self.sampling, stop=self.stop,
                     on_token=self.add)
        finally:
            print(flush=True)

    def add(self, token: torch.Tensor):
        self.new += [i for i in token.tolist() if i not in self.stop]
        ids = self.printed + self.new
        old, text = (self.tokenizer.decode(x, skip_special_tokens=True)
                     for x in (self.printed, ids))
        if not text.endswith("\ufffd"):  # else inside a character
            print(text[len(old) :], end="", flush=True)
            self.text += text[len(old) :]
            self.printed, self.new = ids[-32:], []


def write_text(writer: Writer, options: GenerateOptions):
    """Continue all prompts, one after another. Raises ConfigError."""
    for i, prompt in enumerate(options.prompt or ["\n"], 1):
        if len(options.prompt) > 1:
            print(f"--- {i} of {len(options.prompt)}")
        if options.chat:
            ids = writer.chat_ids([dict(role="user", content=prompt)])
        else:
            ids = writer.ids(prompt, tokenizers.text_start(writer.tokenizer))
            print(prompt, end="", flush=True)
        writer.write(ids)


def talk(writer: Writer, options: ChatOptions):
    """A conversation; input from a pipe or a file is one prompt, and only its answer is printed."""
    system, history = options.system, []  # messages
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        said = dict(role="user", content=sys.stdin.read().strip())
        return writer.write(writer.chat_ids([said], system))
    with suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit and recall lines
    print(HELP)
    while True:
        try:
            said = input("> ").strip()
        except KeyboardInterrupt:
            said = "/help"
            print()
        except EOFError:
            print()
            return
        command, _, text = said.partition(" ")
        if command == "/system":
            system = text.strip()
        elif command == "/reset":
            history = []
        elif command.startswith("/"):
            print(HELP)
        elif said:
            history.append(dict(role="user", content=said))
            try:
                ids = writer.chat_ids(history, system)
            except ConfigError as e:  # say, the template takes no system prompt
                print(f"error: {e}", file=sys.stderr)
                history.pop()
                continue
            with suppress(KeyboardInterrupt):
                writer.write(ids)
            history.append(dict(role="assistant", content=writer.text))


def evaluate(source: Path, options: EvalOptions) -> str:
    """Scores by lm-evaluation-harness; exports a run to a temporary folder. Raises ConfigError."""
    tasks = [task for name in filter(None, ",".join(options.tasks).split(","))
             for task in sorted(map(str, Path(name).glob("*.yaml"))) or [name]]  # in a folder
    if not tasks:
        raise ConfigError("--tasks: expected names or files of tasks, such as --tasks hellaswag")
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as e:
        raise ConfigError(f"eval: {e}; pip install 'lm_eval[hf]'") from None
    folders = [str(Path(task).parent) for task in tasks if Path(task).is_file()]
    # looking through all of the harness's own tasks takes seconds
    manager = TaskManager(include_path=folders, include_defaults=len(folders) < len(tasks))
    trust, device = options.trust_remote_code, str(pick_device(options.device, 0))
    with tempfile.TemporaryDirectory(prefix="steady-eval-") as exported:
        if not is_theirs(source):
            export(source, Path(exported), ExportOptions(trust_remote_code=trust))
            source = exported
        try:
            model = HFLM(str(source), device=device, batch_size=options.batch_size,
                         trust_remote_code=trust)
            results = simple_evaluate(model, tasks=tasks, task_manager=manager, limit=options.limit,
                                      num_fewshot=options.num_fewshot, log_samples=False)
        except (OSError, KeyError, ValueError) as e:  # no such model, task or data, no network
            raise ConfigError(f"eval --tasks {' '.join(tasks)}: {' '.join(str(e).split())}") from e
    return json.dumps(results["results"]) if options.json else make_table(results)


def ends_of(tokenizer, folder: Path | None, of_data: int | None = None) -> list[int]:
    """All ids that end a text, from its data, tokenizer, chat template and the model's files."""
    ends = tokenizers.end_of_text_ids(folder) if folder else []
    if tokenizer:
        ends = [tokenizer.eos_token_id, *ends, end_of_turn(tokenizer)]
    return list(dict.fromkeys(i for i in (of_data, *ends) if i is not None))


def usual_sampling(folder: Path | None) -> dict[str, float]:
    """Values for SAMPLING in a model's generation_config.json; {} if one is out of bounds."""
    found = tokenizers.read_json(folder / "generation_config.json") if folder else {}
    if found.get("do_sample") is False:
        return dict(temperature=0)
    try:
        usual = {name: type(default)(found[name]) for name, default in SAMPLING.items()
                 if found.get(name) is not None}
        check_bounds(SamplingOptions(**usual))
    except (ValueError, TypeError, OverflowError, ConfigError):
        return {}
    return usual


def is_theirs(source: Path) -> bool:
    """Whether the source is a Hugging Face folder, or on the hub."""
    has_config = (source / "config.json").exists() or lora.is_adapter_folder(source)
    return has_config or not source.exists()


def open_model(source: Path, trust_remote_code: bool = False):
    """(model, tokenizer, folder of the model's or --init_from's own files). Raises ConfigError."""
    if is_theirs(source):
        cfg = Config(init_from=str(source), trust_remote_code=trust_remote_code)
        state, cfg = None, huggingface.config_from_hf(cfg)
        tokenizer = tokenizers.load_tokenizer(str(huggingface.tokenizer_folder(str(source))))
    else:
        checkpoint, state, cfg = open_checkpoint(source, trust_remote_code)
        if not (tokenizer := tokenizer_of(state, checkpoint.run_dir)):
            raise ConfigError(f"{checkpoint}: its run has no tokenizer, only token ids")
    cfg.seq_len = cfg.max_position or cfg.seq_len  # the base may have seen longer texts
    return build(cfg, state), tokenizer, source_folder(cfg)


def open_checkpoint(source: Path, trust_remote_code: bool) -> tuple[Checkpoint, dict, Config]:
    """(the verified checkpoint of a run or a file, its state, its options). Raises ConfigError."""
    if not (checkpoint := find_checkpoint(source)):
        raise ConfigError(f"{source}: expected a run, as runs/001, or one of its checkpoints")
    state, known = checkpoint.state(), Config.__dataclass_fields__
    state["model"] |= state.get("ema", {})  # with --ema, the averages replace the weights
    cfg = Config(**{name: value for name, value in state["config"].items() if name in known})
    return checkpoint, state, replace(cfg, trust_remote_code=trust_remote_code)


def source_folder(cfg: Config) -> Path | None:
    """The folder of --init_from, if there is any; a note if it is gone."""
    if cfg.init_from:
        try:
            return huggingface.folders(cfg.init_from, cfg.trust_remote_code, weights=False)[-1]
        except ConfigError as e:
            print(f"note: without the configuration of --init_from: {e}", file=sys.stderr)
    return None


def tokenizer_of(state: dict, run_dir: Path | None):
    """The tokenizer of a checkpoint in a run directory; None if there is none."""
    if state["tokenizer"] == "bytes":
        return tokenizers.byte_tokenizer()
    if not run_dir or not (run_dir / "tokenizer").is_dir():
        return None
    return tokenizers.load_tokenizer(str(run_dir / "tokenizer"))


def build(cfg: Config, state: dict | None = None):
    """The model of a checkpoint, adapters merged, or of --init_from. Raises ConfigError."""
    model = foreign.HFModel(cfg) if cfg.model == "transformers" else Transformer(cfg)
    if cfg.model != "transformers" and (state is None or cfg.lora_rank):
        huggingface.load_initial(model, cfg.init_from, Shards())
    if cfg.lora_rank:
        if huggingface.fingerprint(cfg.init_from) != state["base"]:
            raise ConfigError(f"the run adapts other weights than {cfg.init_from} now has")
        parts = huggingface.linear_parts(model)
        pairs = lora.pairs_of(state["model"], parts, cfg)
        lora.merge(model.state_dict(), Shards(), parts, pairs, lora.alpha_of(cfg) / cfg.lora_rank)
    elif state:
        model.load_state_dict(state["model"])
    return model


def export(source: Path, out: Path, options: ExportOptions) -> str:
    """Write a checkpoint in the format of transformers, or of peft. Raises ConfigError."""
    checkpoint, state, cfg = open_checkpoint(source, options.trust_remote_code)
    if out.is_file() or out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty; choose another folder")
    if options.adapter and not cfg.lora_rank:
        raise ConfigError(f"{checkpoint}: --adapter: it was trained without --lora_rank")
    if cfg.qk_norm and cfg.qkv_bias:
        raise ConfigError(f"{checkpoint}: no Hugging Face model has both --qk_norm and --qkv_bias")
    is_foreign, weights, dtype = cfg.model == "transformers", state["model"], DTYPES[options.dtype]
    if options.adapter:
        with torch.device("cpu" if is_foreign else "meta"):  # built for the names of its layers
            model = foreign.HFModel(cfg) if is_foreign else Transformer(cfg)
    elif is_foreign or cfg.lora_rank:
        model = build(cfg, state)
        weights = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in weights.items():
        if name not in state.get("whole", ()) and not tensor.to(dtype).isfinite().all():
            raise ConfigError(f"{checkpoint}: non-finite weights in {name}, as {dtype}")
    folder, tokenizer = source_folder(cfg), tokenizer_of(state, checkpoint.run_dir)
    ends = [i for i in ends_of(tokenizer, folder, state.get("end_of_text")) if i < cfg.vocab_size]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not tokenizer:
            print("note: exported without a tokenizer: the run has none", file=sys.stderr)
        elif state["tokenizer"] == "bytes":
            tokenizer.save_pretrained(out)
        else:
            shutil.copytree(checkpoint.run_dir / "tokenizer", out, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns(tokenizers.MADE))
        if tokenizer:
            tokenizers.serve_version_4(out)
        if options.adapter:
            lora.save(out, lora.pairs_of(weights, huggingface.linear_parts(model), cfg), cfg, dtype)
        else:
            if is_foreign:
                model.module.to(dtype).save_pretrained(out, max_shard_size="5GB")
            else:
                huggingface.save_weights(weights, cfg, out, dtype)
            huggingface.save_config(cfg, folder, out, dtype, ends)
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"{out}: could not be written: {disk_error(e, out.parent)}") from None
    return f"{checkpoint} at step {state['step']} to {out}"
