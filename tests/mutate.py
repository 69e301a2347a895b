"""Break lines of the program on purpose, one at a time, and list those that no test notices.

    python tests/mutate.py                  a hundred lines, spread over the modules
    python tests/mutate.py --file data.py   candidates of one file only
    python tests/mutate.py tests/test_x.py  with these tests only

Run by hand. The tests run once in a copy of the repository, with a record of the lines that each
reaches. Then the tests that reach a broken line run, the quickest first, until one fails.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch._dynamo  # noqa: F401 - once, before the forks

ROOT = Path(__file__).resolve().parent.parent
FILES = [path.relative_to(ROOT).as_posix()
         for pattern in ("*.py", "steady/checkpoints/*.py", "steady/guard/*.py")
         for path in sorted(ROOT.glob(pattern))]
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Add,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}
TESTS = 60  # for one mutant, at most
SECONDS = 600  # a mutant that hangs longer is caught


class Mutant(NamedTuple):
    file: str
    line: int
    start: int  # in bytes
    old: bytes
    new: bytes

    def __str__(self):
        old, new = (" ".join(side.decode().split())[:70] for side in (self.old, self.new))
        return f"{self.file}:{self.line}: {old}  ->  {new}"


def broken(node: ast.AST) -> str:
    """The replacement of an expression or a statement; "" if it stays."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            return f"({ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], right))})"
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            return f"({ast.unparse(ast.BinOp(left, SWAPS[type(op)](), right))})"
        case ast.BoolOp(op, values):
            return f"({ast.unparse(ast.BoolOp(SWAPS[type(op)](), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            return str(not value)
        case ast.Constant(int(value) | float(value)):
            return str(value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            return "pass"
    return ""


def candidates(file: str) -> list[Mutant]:
    """All that can be broken in a file by replacing one expression or statement."""
    text = (ROOT / file).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def visit(node):
        match node:
            case ast.Call(ast.Name("print" | "ConfigError" | "option")):  # words for the user
                return
            case ast.JoinedStr() | ast.AnnAssign() | ast.arguments():
                return
            case ast.If(ast.Compare(ast.Name("__name__"))):
                return
        if new := broken(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            found.append(Mutant(file, node.lineno, start, text[start:end], new.encode()))
        for inner in ast.iter_child_nodes(node):
            visit(inner)

    visit(ast.parse(text))
    return found


class Reached:
    """A plugin of pytest: records the lines that each test reaches, also in forks."""

    def __init__(self, copy: Path, file: Path):
        self.names = {str(copy / name): name for name in FILES}
        self.output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, name: str, number: float):
        with contextlib.suppress(OSError):  # of a test with a full disk
            os.write(self.output, f"{self.test}\t{name}\t{number}\n".encode())

    def trace(self, frame, event, _):
        name = self.names.get(frame.f_code.co_filename)
        if name and (name, frame.f_lineno) not in self.seen:
            self.seen.add((name, frame.f_lineno))
            self.write(name, frame.f_lineno)
        return self.trace if name else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test, self.seen, began = item.nodeid, set(), time.monotonic()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        result = yield
        sys.settrace(None)
        threading.settrace(None)
        self.write("seconds", time.monotonic() - began)
        return result


def reached_by(record: Path) -> dict[tuple[str, int], list[str]]:
    """(file, line) → the tests that reach it, the quickest first; line 0: any of the file."""
    seconds, tests = {}, defaultdict(set)
    for row in record.read_text().splitlines():
        test, name, number = row.split("\t")
        if name == "seconds":
            seconds[test] = float(number)
        else:
            tests[name, int(number)].add(test)
            tests[name, 0].add(test)
    return {place: sorted(found, key=seconds.get)[:TESTS] for place, found in tests.items()}


def passes(copy: Path, tests: list[str], limit: float, plugins=()) -> bool:
    """Run tests in a fork; tests that take longer than `limit` seconds fail."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(copy)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *tests], plugins)
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + limit
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)
    return os.waitpid(pid, 0)[1] == 0


def survives(mutant: Mutant, copy: Path, tests) -> bool:
    # a line that only an import reaches: all tests of its file
    reaching = tests.get((mutant.file, mutant.line)) or tests.get((mutant.file, 0))
    path = copy / mutant.file
    text = path.read_bytes()
    path.write_bytes(text[: mutant.start] + mutant.new + text[mutant.start + len(mutant.old) :])
    alive = not reaching or passes(copy, reaching, SECONDS)
    path.write_bytes(text)
    return alive


def main():
    parser = argparse.ArgumentParser(description="How many broken lines do the tests not notice?")
    parser.add_argument("tests", nargs="*", default=["tests"], help="test files (default: all)")
    parser.add_argument("--count", type=int, default=100, help="lines to break")
    parser.add_argument("--file", choices=FILES, help="of this file only")
    parser.add_argument("--seed", type=int, default=0, help="selects the lines")
    args = parser.parse_args()
    found = [m for file in ([args.file] if args.file else FILES) for m in candidates(file)]
    chosen = random.Random(args.seed).sample(found, min(args.count, len(found)))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # or a mutant's might stay
    sys.dont_write_bytecode = True
    sys.path.remove(str(ROOT / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        copy, record = Path(folder) / "copy", Path(folder) / "record"
        ignore = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignore)
        if not passes(copy, args.tests, 3600, [Reached(copy, record)]):  # all would be "caught"
            sys.exit("the tests fail without a mutant:\n" + (copy / "output.txt").read_text())
        tests = reached_by(record)
        survivors = 0
        for mutant in chosen:
            alive = survives(mutant, copy, tests)
            survivors += alive
            print("SURVIVES" if alive else "caught  ", mutant, flush=True)
    print(f"{survivors} of {len(chosen)} survive ({len(found)} candidates)")


if __name__ == "__main__":
    main()
