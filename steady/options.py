"""Command lines and YAML files from a dataclass of options.

An option is a dataclass field with help, bounds and a few marks, made by `option`. Every value is
text that one argparse parser reads, wherever it comes from, so all sources are checked alike.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import operator
import os
from types import NoneType
from typing import Literal, get_args, get_origin

import yaml

UNKNOWN = 10**12  # max_steps until --max_minutes sets it
SYNONYMS = dict(  # names in nanoGPT, transformers and others, for suggestions
    lr="learning_rate", min_lr="min_learning_rate", n_embd="d_model", hidden_size="d_model",
    num_attention_heads="n_head", block_size="seq_len", max_length="seq_len", max_iters="max_steps",
    gradient_accumulation_steps="micro_batch_size", max_grad_norm="grad_clip", dtype="precision",
    logging_steps="log_interval", save_steps="save_interval", resume_from_checkpoint="auto_resume",
    use_lora="lora_rank", use_peft="lora_rank", val_split="val_data val_fraction")


class ConfigError(Exception):
    """Wrong flags, files or data. The message is one line for the user; the exit code is 2."""


class Failed(Exception):
    """Ends a run with exit code 1 and a message of one line, without a traceback."""


@contextlib.contextmanager
def reading_paths(flag: str = ""):
    """Turn an OSError into a ConfigError while files that options name are read and made."""
    try:
        yield
    except OSError as e:
        path = e.filename or "a file"
        raise ConfigError(f"{flag}{path}: {e.strerror}; name a usable path") from e


def due(step: int, every: int | None, *also: int) -> bool:
    """Whether `step` is a multiple of an interval, or in `also`; never if that is 0 or None."""
    return bool(every) and (step % every == 0 or step in also)


# --- an option -------------------------------------------------------------------------------


def option(default, help: str, **marks):
    """A dataclass field with its help text. A list default is copied for each instance.

    Marks: group (title of a group of options that begins here); at_least, above, at_most, below
    (bounds); may_be_empty=True (of text); metavar; flag (another name on the command line);
    fixed (see `fixed_options`); saved=False (belongs to one command, so `write_yaml` leaves it
    out); command_line=True (a file may not set it).
    """
    value = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**value, metadata={"help": help, **marks})


def fixed_options(options, kind: str) -> list[str]:
    """Names of the options that a checkpoint fixes: of kind "weights", the shape of the model;
    "function", the computation on the same weights; "trajectory", the identity of the run.
    """
    return [f.name for f in dataclasses.fields(options) if f.metadata.get("fixed") == kind]


BOUNDS = {"at_least": ("at least", operator.ge), "above": ("more than", operator.gt),
          "at_most": ("at most", operator.le), "below": ("below", operator.lt)}


def check_bounds(options):
    """Raise ConfigError for an empty text, and a number that is not finite or out of bounds."""
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        bounds = [(*BOUNDS[mark], bound) for mark, bound in f.metadata.items() if mark in BOUNDS]
        for x in value if isinstance(value, list) else [value]:
            expected = None
            if isinstance(x, float) and not math.isfinite(x):
                expected = "a finite number"
            elif x == "" and not f.metadata.get("may_be_empty"):
                expected = "a value; leave the option out for its default"
            elif x is not None and not all(holds(x, bound) for _, holds, bound in bounds):
                expected = " and ".join(f"{words} {bound}" for words, _, bound in bounds)
            elif isinstance(x, int) and abs(x) >= 2**63:
                expected = "a 64-bit integer"
            if expected:
                raise ConfigError(f"--{f.name} {x!r}: expected {expected}")


# --- the command line ------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(message.removeprefix("argument "))


def make_parser(options: type, prog: str, usage: str, about: str,
                needed: tuple[str, ...] = (), everything: bool = True) -> Parser:
    """A parser of all fields of a dataclass, in the groups that its fields name.

    needed: if any, the only options that the help shows, unless it shows everything.
    """
    parser = group = Parser(
        prog=prog, usage=f"%(prog)s {usage}", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 30, 100),
        description=f"{about} In names of options, dashes and underscores are the same; --no_NAME "
                    "switches an option off.")
    if needed:
        parser.add_argument("--help_all", action="help", help="show all options")
    for f in dataclasses.fields(options):
        if "group" in f.metadata:
            group = parser.add_argument_group(f.metadata["group"])
        add_option(group, f, hidden=not everything and f.name not in needed)
    return parser


def add_option(group, f: dataclasses.Field, hidden: bool):
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    text = f.metadata.get("help", "")
    shown = " ".join(default) if isinstance(default, list) else default
    if shown not in (None, "") and default is not False and "(default" not in text:
        text += f" (default: {'on' if default is True else shown})"
    how = dict(dest=f.name, default=default, help=argparse.SUPPRESS if hidden else text)
    kind = f.type
    if NoneType in get_args(kind):
        kind = next(k for k in get_args(kind) if k is not NoneType)
    if kind is bool:
        group.add_argument(f"--{f.name}", **how, action="store_true")
        how["help"] = argparse.SUPPRESS
        group.add_argument(f"--no_{f.name}", **how, action="store_false")
        return
    if get_origin(kind) is list:
        how["nargs"], kind = "+", get_args(kind)[0]
    if get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    else:
        words = {str: "TEXT", int: "N", float: "X"}
        how |= dict(type=kind, metavar=f.metadata.get("metavar", words[kind]))
    if flag := f.metadata.get("flag"):
        group.add_argument(f"--{flag}", **how)
        how["help"] = argparse.SUPPRESS
    group.add_argument(f"--{f.name}", **how)


def read_flags(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse flags. The ConfigError for an unknown name suggests the nearest known one."""
    args, unknown = parser.parse_known_args([normal_form(parser, arg) for arg in argv])
    if unknown and not unknown[0].startswith("-"):
        raise ConfigError(f"unexpected argument {unknown[0]}; expected options: --NAME VALUE, and "
                          "switches: --NAME or --no_NAME")
    if unknown:
        flag = unknown[0].split("=")[0]
        raise ConfigError(f"unknown option {flag}{nearest(flag, parser._option_string_actions)}")
    return args


def normal_form(parser: Parser, arg: str) -> str:
    """A flag with underscores, and `--x=true` of a switch as `--x`."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    name = "--" + name[2:].replace("-", "_")
    if equals and isinstance(getattr(parser._option_string_actions.get(name), "const", None), bool):
        if value.lower() in ("true", "yes", "on", "1"):
            return name
        if value.lower() in ("false", "no", "off", "0"):
            return f"--no_{name[2:]}"
        raise ConfigError(f"{name} {value}: expected true or false")
    return name + equals + value


def nearest(name: str, names) -> str:
    names = {known.lstrip("-"): known for known in names}  # dashes are alike in all of them
    ours = [our for our in SYNONYMS.get(name.lstrip("-"), "").split() if our in names]
    close = ours or difflib.get_close_matches(name.lstrip("-"), names, 1, 0.5)
    return f" (did you mean {names[close[0]]}?)" if close else ""


# --- YAML ------------------------------------------------------------------------------------


class UniqueKeys(yaml.BaseLoader):
    """Refuses a key given twice; yaml itself would take the last."""

    def construct_mapping(self, node, deep=False) -> dict:
        names = set()
        for key, _ in node.value:
            if (name := str(key.value)) in names:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {name} is given twice")
            names.add(name)
        return super().construct_mapping(node, deep)


def expect_file(path, option: str = ""):
    """Raise ConfigError for a folder, a FIFO or a device: reading one may never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a FIFO or a device"
        raise ConfigError(f"{option}{path}: is {kind}; expected a file")


def read_yaml(path: str) -> dict:
    """The mapping in a file, its values as written: `1e-4`, `no` and 010 are text."""
    expect_file(path, "--config ")
    try:
        with reading_paths("--config "), open(path, encoding="utf-8") as file:
            values = yaml.load(file, UniqueKeys) or {}
    except (ValueError, RecursionError, yaml.YAMLError) as e:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: expected lines of the form `name: value`")
    return values


def yaml_flags(parser: Parser, options: type, path: str, drop: set[str]) -> list[str]:
    """The options in a YAML file as flags; if it names a model, except those in `drop`."""
    marks, flags = {f.name: f.metadata for f in dataclasses.fields(options)}, []
    given, aliases = read_yaml(path), {mark.get("flag"): name for name, mark in marks.items()}
    values = {aliases.get(name, name): value for name, value in given.items()}
    if twice := [name for name in given if aliases.get(name) in given]:
        raise ConfigError(f"{path}: {twice[0]} is given twice, also as {aliases[twice[0]]}")
    for name, value in values.items():
        if name not in marks:
            raise ConfigError(f"{path}: unknown option {name}{nearest(name, marks)}")
        if marks[name].get("command_line"):
            raise ConfigError(f"{path}: {name} is for the command line, not for a file")
        items = value if isinstance(value, list) else [value]
        most = len(items) if isinstance(parser.get_default(name), list) else 1
        if len(items) > most or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{path}: {name} must be a value, or a list if it takes several")
        if value in ("", "null", "~", []) or name in drop and "model" in values:
            continue
        flags += [f"--{name}={items[0]}"] if len(items) == 1 else [f"--{name}", *items]
    try:
        read_flags(parser, flags)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    return flags


def write_yaml(options, path: str, notes: dict[str, str]):
    """Write options so that `yaml_flags` reads them back, under the notes as comments."""
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)
              if f.metadata.get("saved", True)}
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"# {k}: {' '.join(v.split())}\n" for k, v in notes.items())
        yaml.safe_dump(values, file, sort_keys=False, width=100)
        file.flush()
        os.fsync(file.fileno())
