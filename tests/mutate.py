"""Break lines of the program on purpose, one at a time, and list those that no test notices.

    python tests/mutate.py                  a hundred lines, spread over the modules
    python tests/mutate.py --file data.py   candidates of one file only
    python tests/mutate.py --list           only show what would be broken

Run by hand: a hundred breaks take most of an hour on two cores. Each is made in a copy of the
repository, where the tests that belong to the module run until the first failure.
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # module → test files that run against it, in this order
    "train.py": ["test_train", "test_attacks", "test_faults", "test_documents"],
    "model.py": ["test_model", "test_documents", "test_huggingface"],
    "data.py": ["test_data", "test_attacks_data", "test_documents", "test_train"],
    "monitor.py": ["test_monitor", "test_train", "test_slowdowns"],
    "steady/conflicts.py": ["test_config", "test_attacks_cli"],
    "steady/tokens/order.py": ["test_data", "test_documents", "test_train"],
    "steady/watch/clock.py": ["test_monitor", "test_train", "test_slowdowns"],
    "steady/guard/memory.py": ["test_config", "test_faults", "test_train"],
    "config.py": ["test_config", "test_attacks_cli", "test_model", "test_train"],
    "steady/checkpoints/checkpoint.py": [
        "test_attacks", "test_parts", "test_train", "test_faults", "test_attacks_cli"],
    "steady/checkpoints/writer.py": ["test_parts", "test_attacks", "test_train", "test_faults"],
    "steady/checkpoints/state.py": ["test_attacks", "test_train", "test_faults", "test_parallel"],
    "steady/guard/guard.py": ["test_guard", "test_spikes", "test_train", "test_faults"],
    "steady/guard/faults.py": ["test_guard", "test_attacks", "test_faults", "test_attacks_cli"],
}
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.And: "or", ast.Or: "and",
}
SECONDS = 600  # a mutant that hangs longer is caught


class Mutant(NamedTuple):
    file: str
    line: int
    start: int  # offsets in the text of the file
    end: int
    new: str


def candidates(file: str) -> list[Mutant]:
    """Everything that can be broken in a file by replacing one expression or statement."""
    text = (ROOT / file).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = [line.encode() for line in text.splitlines()]

    def offset(line: int, column: int) -> int:  # ast counts columns in UTF-8 bytes
        return starts[line - 1] + len(raw[line - 1][:column].decode())

    found = []

    def add(node, new: str):
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        found.append(Mutant(file, node.lineno, start, end, new))

    def source(node) -> str:
        return ast.get_source_segment(text, node)

    def visit(node):
        if isinstance(node, ast.Call) and source(node.func) in ("print", "ConfigError", "option"):
            return  # words for the user
        if isinstance(node, (ast.JoinedStr, ast.AnnAssign)):
            return
        if isinstance(node, (ast.FunctionDef, ast.arguments)):
            for inner in getattr(node, "body", []):
                visit(inner)
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            new = SWAPS[type(node.ops[0])]
            add(node, f"({source(node.left)} {new} {source(node.comparators[0])})")
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            add(node, f"({source(node.left)} {SWAPS[type(node.op)]} {source(node.right)})")
        elif isinstance(node, ast.BoolOp):
            add(node, "(" + f" {SWAPS[type(node.op)]} ".join(map(source, node.values)) + ")")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add(node, f"({source(node.operand)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            add(node, str(not node.value if type(node.value) is bool else node.value + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            add(node, "pass")
        elif isinstance(node, ast.AugAssign):
            add(node, "pass")
        for inner in ast.iter_child_nodes(node):
            visit(inner)

    for node in ast.parse(text).body:
        if not (isinstance(node, ast.If) and "__main__" in source(node.test)):
            visit(node)
    return found


def failure(file: str, copy: Path) -> str:
    """Run the tests of a module in a copy of the repository; "" if all pass, else what they say."""
    tests = [f"tests/{name}.py" for name in TESTS[file]]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, timeout=SECONDS)
        return done.stdout.decode()[-5000:] + done.stderr.decode() if done.returncode else ""
    except subprocess.TimeoutExpired:
        return f"longer than {SECONDS} s"


def survives(mutant: Mutant, copy: Path) -> bool:
    path = copy / mutant.file
    text = path.read_text()
    try:
        path.write_text(text[: mutant.start] + mutant.new + text[mutant.end :])
        return not failure(mutant.file, copy)
    finally:
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description="How many broken lines do the tests not notice?")
    parser.add_argument("--count", type=int, default=100, help="lines to break")
    parser.add_argument("--file", choices=TESTS, help="of this file only")
    parser.add_argument("--seed", type=int, default=0, help="which lines")
    parser.add_argument("--workers", type=int, default=2, help="copies tested at the same time")
    parser.add_argument("--list", action="store_true", help="show them and stop")
    args = parser.parse_args()
    found = [m for file in ([args.file] if args.file else TESTS) for m in candidates(file)]
    chosen = sorted(random.Random(args.seed).sample(found, min(args.count, len(found))))

    def show(mutant: Mutant) -> str:
        text = (ROOT / mutant.file).read_text()
        old = " ".join(text[mutant.start : mutant.end].split())
        return f"{mutant.file}:{mutant.line}: {old[:70]}  ->  {mutant.new[:70]}"

    if args.list:
        print(*map(show, chosen), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool:
        copies = Queue()
        for i in range(args.workers):
            ignore = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__")
            copies.put(Path(shutil.copytree(ROOT, Path(folder) / str(i), ignore=ignore)))

        def test(function, argument):
            copy = copies.get()
            try:
                return function(argument, copy)
            finally:
                copies.put(copy)

        files = sorted({mutant.file for mutant in chosen})
        for file, failed in zip(files, pool.map(test, [failure] * len(files), files), strict=True):
            if failed:  # every mutant would be "caught"
                sys.exit(f"the tests of {file} fail without a mutant:\n{failed}")

        survivors = 0
        results = pool.map(test, [survives] * len(chosen), chosen)
        for mutant, alive in zip(chosen, results, strict=True):
            survivors += alive
            print("SURVIVES" if alive else "caught  ", show(mutant), flush=True)
    print(f"{survivors} of {len(chosen)} survive ({len(found)} candidates)")


if __name__ == "__main__":
    main()
