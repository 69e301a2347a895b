"""The rules of the house: who may import whom, and how long a file may be."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ["train", "model", "data", "monitor", "config"]  # all that a fork has to read
SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path.read_text("utf-8")
    for pattern in ("*.py", "steady/**/*.py", "tools/*.py") for path in sorted(ROOT.glob(pattern))}


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
    """Neither tools and the five, nor a folder of its own that stands above."""
    floors = ["watch", "tokens", "ranks", "models", "checkpoints", "guard"]
    for name, imported in IMPORTS.items():
        if name.startswith("steady."):
            assert all(other.startswith("steady") for other in imported), (name, imported)
            folder, *others = (each.split(".")[1] for each in (name, *imported))
            above = floors[floors.index(folder) + 1 :] if folder in floors else []
            assert set(others).isdisjoint(above), (name, imported)


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
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError, with the names


LINES = {  # of code, at most: only ever lowered
    "train.py": 542,
    "model.py": 261,
    "data.py": 339,
    "monitor.py": 300,
    "config.py": 293,
    "steady/checkpoints": 1301,
    "steady/ranks": 1095,
    "steady/guard": 759,
    "steady/watch": 2305,
    "steady/tokens": 879,
    "steady/models": 1298,
    "steady": 378,
    "tools": 2146,
}


def test_no_room_grows():
    lines = {}
    for room in LINES:
        files = [ROOT / room] if room.endswith(".py") else (ROOT / room).glob("*.py")
        lines[room] = sum(len(file.read_text("utf-8").splitlines()) for file in files)
    assert sum(lines.values()) == sum(len(each.splitlines()) for each in SOURCES.values())
    assert {room: n for room, n in lines.items() if n > LINES[room]} == {}


def test_tests_do_not_grow():
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in ROOT.glob("tests/**/*.py"))
    assert lines <= 17_689  # with benchmarks; only ever lowered


# in lines, at most: only ever lowered
PAGES = {"CHANGELOG.md": 60, "README.md": 140, "README.zh-CN.md": 140, "EXPERIMENTS.md": 80}


def test_pages_stay_short_and_files_can_be_read_in_one_sitting():
    for page, most in PAGES.items():
        assert len((ROOT / page).read_text("utf-8").splitlines()) <= most, page
    assert [name for name, source in SOURCES.items() if len(source.splitlines()) > 550] == []
