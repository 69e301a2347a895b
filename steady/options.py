"""Command lines and YAML files from a dataclass of options.

An option is a dataclass field with help, bounds and a few marks, made by `option`. Values are
parsed as text by one parser, wherever they come from, so all sources are checked alike.
"""

import argparse
import dataclasses
import difflib
import math
import os
from types import NoneType
from typing import Literal, get_args, get_origin

import yaml

# What command lines and files of options say: the paths among it are the user's.
typed = set()


class ConfigError(Exception):
    """Wrong flags, files or data. The message is one line for the user; the exit code is 2."""


class Failed(Exception):
    """What ends a run with exit code 1; the message is one line, and says it without a traceback.

    of_one_rank: whether the others have no word of it, so that it is printed on any rank.
    """

    of_one_rank = False


def option(default, help: str, **marks):
    """A dataclass field with its help text. A list default is copied for each instance.

    Marks: group (title of a group of options that begins here); at_least, above, at_most, below
    (bounds); may_be_empty=True (of text); metavar; fixed (see `fixed_options`); saved=False
    (belongs to one command, so `write_yaml` leaves it out); command_line=True (a file may not set
    it).
    """
    metadata = {"help": help, **marks}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fixed_options(options, kind: str) -> list[str]:
    """Names of the options that a checkpoint fixes.

    "weights": the shape of the model; "function": what the same weights compute; "trajectory":
    which run it is.
    """
    return [f.name for f in dataclasses.fields(options) if f.metadata.get("fixed") == kind]


def check_bounds(options):
    """Raise ConfigError for an empty text, and a number that is not finite or out of bounds."""
    compare = {
        "at_least": ("at least", lambda x, bound: x >= bound),
        "above": ("more than", lambda x, bound: x > bound),
        "at_most": ("at most", lambda x, bound: x <= bound),
        "below": ("below", lambda x, bound: x < bound),
    }
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        values = value if isinstance(value, list) else [value]
        if any(isinstance(x, float) and not math.isfinite(x) for x in values):
            raise ConfigError(f"--{f.name} {value}: expected a finite number")
        if "" in values and not f.metadata.get("may_be_empty"):
            raise ConfigError(f"--{f.name}: is empty; expected a value, or leave it out")
        bounds = [(*compare[k], bound) for k, bound in f.metadata.items() if k in compare]
        if value is not None and not all(holds(value, bound) for _, holds, bound in bounds):
            expected = " and ".join(f"{words} {bound}" for words, _, bound in bounds)
            raise ConfigError(f"--{f.name} {value}: expected {expected}")
        if any(isinstance(x, int) and abs(x) >= 2**63 for x in values):
            raise ConfigError(f"--{f.name} {value}: expected a number of 64 bits")


def due(step: int, every: int | None, *also: int) -> bool:
    """Whether `step` is a multiple of an interval, or in `also`; never if it is 0 or None."""
    return bool(every) and (step % every == 0 or step in also)


def expand_user(options, *names: str):
    """`options` with ~ and ~user replaced in the paths of these names. Raises ConfigError."""
    paths = {name: path for name in names if (path := getattr(options, name))}
    expanded = {name: home_expanded(f"--{name}", path) for name, path in paths.items()}
    return dataclasses.replace(options, **expanded)


def home_expanded(option: str, path: str) -> str:
    """A path with ~ and ~user replaced. Raises ConfigError, which names `option`."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(f"{option} {path}: no such user; write ./{path} for a name that begins "
                          "with ~")
    return expanded


# --- the command line ------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ConfigError(message)


class Switch(argparse.Action):
    """--x and --no_x, without a value."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith("--no_"))


class ShortHelp(argparse.Action):
    """--help where --help_all shows all options."""

    def __call__(self, parser, *_):
        print(self.const.format_help(), end="")
        parser.exit()


def make_parser(options: type, prog: str, usage: str, about: str,
                needed: tuple[str, ...] = ()) -> Parser:
    """A parser of the fields of a dataclass, in the groups that its fields name.

    needed: the options that --help shows; --help_all then shows all of them.
    """
    def parser(**how) -> Parser:
        return Parser(
            prog=prog, usage=f"%(prog)s {usage}", allow_abbrev=False, exit_on_error=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 30, 100), **how,
            description=f"{about} In names of options, dashes and underscores are the same.")

    full = group = parser(add_help=not needed)
    fields = {f.name: f for f in dataclasses.fields(options)}
    if needed:
        short = parser(add_help=False, epilog=f"--help_all shows all {len(fields)} options.")
        for name in needed:
            add_option(short, fields[name])
        full.add_argument("-h", "--help", action=ShortHelp, nargs=0, const=short, dest="help",
                          default=argparse.SUPPRESS, help="show the options that one needs")
        full.add_argument("--help_all", action="help", dest="help", help="show all options")
    for f in fields.values():
        if "group" in f.metadata:
            group = full.add_argument_group(f.metadata["group"])
        add_option(group, f)
    return full


def add_option(group, f: dataclasses.Field):
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    text = f.metadata["help"]
    unsaid = default is None or default is False or default == []
    if not unsaid and "(default" not in text:
        shown = " ".join(default) if isinstance(default, list) else default
        text += f" (default: {'on' if default is True else shown})"
    how = dict(dest=f.name, default=default, help=text)
    kind = f.type
    if NoneType in get_args(kind):
        kind = next(k for k in get_args(kind) if k is not NoneType)
    if kind is bool:
        forms = [f"--{f.name}", f"--no_{f.name}"]
        if default is False:  # its negation only serves to undo a file
            group.add_argument(forms.pop(), **how | {"help": argparse.SUPPRESS}, action=Switch)
        group.add_argument(*forms, **how, action=Switch)
        return
    if get_origin(kind) is list:
        how["nargs"], kind = "+", get_args(kind)[0]
    if get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    else:
        words = {str: "TEXT", int: "N", float: "X"}
        read = {str: str, int: whole_number, float: number}
        how |= dict(type=read[kind], metavar=f.metadata.get("metavar", words[kind]))
    group.add_argument(f"--{f.name}", **how)


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text:.99}: expected a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text:.99}: expected a number") from None


def read_flags(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse; raises ConfigError, for an unknown name with the nearest one that exists."""
    for arg in argv:
        if "\0" in arg:
            raise ConfigError(f"{arg!r}: holds a null character; expected text without one")
    try:
        args, unknown = parser.parse_known_args([normal_form(parser, arg) for arg in argv])
    except argparse.ArgumentError as e:
        raise ConfigError(f"{e.argument_name or ''} {e.message}".strip()) from None
    if unknown and not unknown[0].startswith("-"):
        raise ConfigError(f"unexpected argument {unknown[0]}; expected options: --NAME VALUE")
    if unknown:
        flag = unknown[0].split("=")[0]
        known = [s for s in parser._option_string_actions if s.startswith("--")]
        raise ConfigError(f"unknown option {flag}{nearest(flag, known)}")
    for action in parser._actions:
        if action.nargs is None and isinstance(getattr(args, action.dest, None), list):
            raise ConfigError(f"--{action.dest} --: expected a value")  # argparse makes it []
    values = [x for v in vars(args).values() for x in (v if isinstance(v, list) else [v])]
    typed.update(x for x in values if isinstance(x, str))
    return args


def read_sources(parser: Parser, sources, *either: str) -> argparse.Namespace:
    """Parse lists of flags; what a later one says wins.

    either: two options of which one stands in for the other; a file has flags as --name=value.
    Raises ConfigError where a list has both.
    """
    flags, names = [], {f"--{name}" for name in either}
    for source in sources:
        given = names & {normal_form(parser, arg).partition("=")[0] for arg in source}
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(sorted(given))}: expected one of them")
        flags = [flag for flag in flags if not given or flag.partition("=")[0] not in names]
        flags += source
    return read_flags(parser, flags)


def normal_form(parser: Parser, arg: str) -> str:
    """A flag with underscores, and `--x=true` of a switch as `--x`."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    name = "--" + name[2:].replace("-", "_")
    if equals and isinstance(parser._option_string_actions.get(name), Switch):
        switched = {"true": name, "yes": name, "on": name, "1": name}
        switched |= dict.fromkeys(("false", "no", "off", "0"), f"--no_{name[2:]}")
        if value.lower() not in switched:
            raise ConfigError(f"{name} {value}: expected true or false")
        return switched[value.lower()]
    return name + equals + value


def nearest(name: str, names) -> str:
    names = {known.lstrip("-"): known for known in names}  # dashes are alike in all of them
    close = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=0.5)
    return f" (did you mean {names[close[0]]}?)" if close else ""


# --- YAML ------------------------------------------------------------------------------------


def yaml_flags(parser: Parser, options: type, path: str, drop: set[str]) -> list[str]:
    """The options in a YAML file as flags, except those in `drop`.

    Checked one by one, so that an error names its line. Values are passed on as written, so YAML's
    own types (`1e-4` is text, `no` is False, 010 is 8) do not matter.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config {path}: {getattr(e, 'strerror', None) or e}") from None
    except RecursionError:
        raise ConfigError(f"{path}: too deeply nested; expected lines of the form "
                          "`name: value`") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(e, 'problem', e)}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected lines of the form `name: value`")
    marks, flags = {f.name: f.metadata for f in dataclasses.fields(options)}, {}
    for key, value in root.value:
        name, where = str(key.value), f"{path}:{key.start_mark.line + 1}"
        if name not in marks:
            raise ConfigError(f"{where}: unknown option {name}{nearest(name, marks)}")
        if marks[name].get("command_line"):
            raise ConfigError(f"{where}: {name} is for the command line, not for a file")
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
            flags[name] = [f"--{name}={value.value}"]
        try:
            read_flags(parser, flags[name])
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from None
    drop = drop if "model" in flags else ()  # what belongs to the model that the file names
    return [flag for name in flags if name not in drop for flag in flags[name]]


def write_yaml(options, path: str, notes: dict[str, str]):
    """Write options so that `yaml_flags` reads them back, under the notes as comments."""
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)
              if f.metadata.get("saved", True)}
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"# {k}: {' '.join(v.split())}\n" for k, v in notes.items())
        yaml.safe_dump(values, file, sort_keys=False, width=100)
        file.flush()
        os.fsync(file.fileno())
