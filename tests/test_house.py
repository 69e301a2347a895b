"""The rules of the house: who may import whom, and how long a file may be."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ["train", "model", "data", "monitor", "config"]  # all that a fork has to read
SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path.read_text("utf-8")
    for pattern in ("*.py", "steady/**/*.py", "tools/*.py") for path in sorted(ROOT.glob(pattern))
}


def imports(source: str) -> set[str]:
    """Modules of this repository that it imports, also in functions, but not if it is run."""
    found, nodes = set(), [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & SOURCES.keys()) or {node.module}
    return found & SOURCES.keys()


IMPORTS = {name: imports(source) for name, source in SOURCES.items()}


def test_there_are_five_modules_at_the_top():
    assert sorted(TOP) == sorted(name for name in SOURCES if "." not in name)


def test_steady_imports_nothing_from_above():
    for name, imported in IMPORTS.items():
        if name.startswith("steady."):
            assert all(other.startswith("steady") for other in imported), (name, imported)


def test_the_watch_works_alone():
    """In anybody's project: monitor.py and steady/watch/ import nothing else of this repository."""
    for name, imported in IMPORTS.items():
        if name == "monitor" or name.startswith("steady.watch"):
            assert all(other.startswith("steady.watch") for other in imported), (name, imported)


def test_top_level_modules_import_only_what_they_may():
    """Tools are imported in `__main__` blocks only, but for flags of train.py that do not train."""
    for name in TOP:
        tools = {other for other in IMPORTS[name] if other.startswith("tools")}
        assert tools == ({"tools.verify"} if name == "train" else set()), name
    for name in ("model", "data", "monitor"):
        assert not IMPORTS[name] & {"train", "model", "data", "monitor"}, name
    assert not IMPORTS["config"] & set(TOP)


def test_what_is_imported_from_steady_exists():
    for path, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "steady":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                assert node.module in SOURCES or names <= SOURCES.keys(), (path, node.module)


def test_no_local_name_hides_a_module_that_its_function_uses():
    def names(nodes, kind) -> set[str]:
        return {node.id for node in nodes if isinstance(node, ast.Name)
                and isinstance(node.ctx, kind)}

    for path, source in SOURCES.items():
        tree = ast.parse(source)
        modules = {(alias.asname or alias.name).split(".")[0] for node in tree.body
                   if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            nodes = list(ast.walk(function))
            local = names(nodes, ast.Store) | {n.arg for n in nodes if isinstance(n, ast.arg)}
            used = names([n.value for n in nodes if isinstance(n, ast.Attribute)], ast.Load)
            assert not local & modules & used, (path, function.name, local & modules & used)


def test_imports_have_no_circles():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as e:
        raise AssertionError(" imports ".join(reversed(e.args[1]))) from None


LINES = {  # of code, at most: only ever lowered
    "train.py": 543,
    "model.py": 261,
    "data.py": 340,
    "monitor.py": 300,
    "config.py": 293,
    "steady/checkpoints": 1303,
    "steady/ranks": 1096,
    "steady/guard": 776,
    "steady/watch": 2305,
    "steady/tokens": 881,
    "steady/models": 1298,
    "steady": 379,
    "tools": 2168,
}


def test_no_room_grows():
    lines = dict.fromkeys(LINES, 0)
    for name, source in SOURCES.items():
        parts = name.split(".")
        if len(parts) == 1:
            room = f"{name}.py"
        elif parts[0] == "steady" and len(parts) > 2:
            room = "/".join(parts[:2])
        else:
            room = parts[0]
        lines[room] += len(source.splitlines())
    assert {room: n for room, n in lines.items() if n > LINES[room]} == {}


def test_tests_do_not_grow():
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in ROOT.glob("tests/**/*.py"))
    assert lines <= 17_918  # with benchmarks; only ever lowered


# in lines, at most: only ever lowered
PAGES = {"CHANGELOG.md": 60, "README.md": 140, "README.zh-CN.md": 140, "EXPERIMENTS.md": 80}


def test_pages_stay_short():
    lines = {page: len((ROOT / page).read_text("utf-8").splitlines()) for page in PAGES}
    assert {page: n for page, n in lines.items() if n > PAGES[page]} == {}


def test_files_can_be_read_in_one_sitting():
    lines = {name: len(source.splitlines()) for name, source in SOURCES.items()}
    assert {name: n for name, n in lines.items() if n > 550} == {}
    assert sum(lines[name] for name in TOP) <= 1850
