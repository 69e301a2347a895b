"""The README and docs/ say what is so: commands run as written, snippets apply and train."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, TINY, column, in_clone
from packaging.requirements import Requirement
from torch.distributed.run import config_from_args, parse_args

import config
from steady.watch.findings import Finding
from tests.bench.common import Figure
from tools import generate, prepare

README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
HACKING = (ROOT / "docs" / "hacking.md").read_text()
PAGES = {path: path.read_text() for path in (ROOT / "README.md", ROOT / "README.zh-CN.md",
                                             *sorted((ROOT / "docs").glob("*.md")))}


def blocks(text: str, *languages: str) -> list[str]:
    """Contents of fenced blocks: of all, or of those in some languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not languages or language in languages]


def inline_code(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text)


def copy_files(to: Path) -> Path:
    """What train.py needs of the repository, without whatever else lies there."""
    to.mkdir()
    for file in (*ROOT.glob("*.py"), *ROOT.glob("requirements*.txt")):
        shutil.copy(file, to)
    for folder in ("steady", "tools"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def shell(command: str, folder: Path) -> str:
    """What a command prints, with this Python first on the PATH; it must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path,
           "XDG_CACHE_HOME": str(folder / "cache")}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shape(line: str) -> str:
    """A line of output without its numbers and the time that is left."""
    return re.sub(r" *\d[\d.,e+-]*[kM]?", " #", line.partition(" | left ")[0])


@pytest.mark.slow
def test_commands_run_as_written(tmp_path):
    """With fewer steps: the default run, its resume, two processes.

    Installing the ranges over the pinned versions would change nothing, which .ci/run relies on.
    """
    clone = copy_files(tmp_path / "clone")
    first, resume, two = (command.strip() for command in blocks(README, "sh"))
    install, _, train = first.partition(" && ")
    assert install == "pip install -r requirements.txt"
    assert "Would install" not in shell(f"{install} --dry-run", clone)

    printed = shell(f"{train} --max_steps 100", clone)
    assert len(printed.split("sample  of what it writes:")[1].strip()) > 100
    if "1 x cpu" in printed:
        shown = next(block for block in blocks(README, "") if block.startswith("step "))
        shapes = {shape(line) for line in printed.splitlines()}
        assert [line for line in shown.splitlines() if shape(line) not in shapes
                and not line.startswith("verdict")] == ["…"]
    assert list(column(clone / "runs/001", "train/loss")) == [1, 50, 100]
    # 2.65 here; the standard library differs between versions of Python
    assert column(clone / "runs/001", "val/bits_per_byte")[100] < 2.9

    printed = shell(f"{resume} --eval_steps 2 --max_steps 103", clone)
    assert "at step 100" in printed and "step 103/103" in printed
    assert list(column(clone / "runs/001", "train/loss")) == [1, 50, 100, 101, 103]

    printed = shell(f"{two} --eval_steps 2 --max_steps 3", clone)
    assert "2 x cpu" in printed or "2 x cuda" in printed
    assert list(column(clone / "runs/002", "train/loss")) == [1, 3]


def commands(text: str) -> list[list[str]]:
    """The words of each `python …` or `torchrun …` line, from the script on."""
    lines = "".join(blocks(text, "sh", "bash")).splitlines() + inline_code(text)
    words = [shlex.split(line.rpartition("&& ")[2]) for line in lines
             if re.match(r"(pip .*&& )?(srun )?(python|torchrun) .*\.py", line)]
    return [line[next(i for i, word in enumerate(line) if word.endswith(".py")):] for line in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_valid(page):
    for script, *argv in commands(PAGES[page]):
        if script == "train.py" and "--help" not in argv:
            config.resolve(config.parse(argv))
        elif script == "data.py" and argv[0] != "show":
            parser = prepare.make_parser(prepare.Options, "data.py", "", "")
            parser.add_argument("inputs", nargs="+")
            prepare.read_flags(parser, argv)
        elif script == "model.py":
            parser = generate.make_parser(generate.COMMANDS[argv[0]], "model.py", "", "")
            parser.add_argument("positional", nargs=3 if argv[0] == "export" else 2)
            generate.read_flags(parser, argv)


STUBS = {
    "torchrun": 'printf "%s\\n" "$@" > args.$$',
    "scontrol": 'printf "node%s\\n" 1 2',
    "srun": 'for id in 0 1; do SLURM_NODEID=$id "$@"; done',
    "ssh": 'eval "${!#}"'}


@pytest.mark.parametrize("name", ["slurm.sh", "ssh.sh", "kubernetes.yaml"])
def test_scripts_for_clusters(tmp_path, name):
    """With stubs around them, they call torchrun twice, with flags that it and train.py know."""
    for stub, text in STUBS.items():
        (tmp_path / stub).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / stub).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTS": "node1 node2",
           "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    command = ["bash", ROOT / "docs" / name, "--data", "some folder"]
    if name == "kubernetes.yaml":
        job = [*yaml.safe_load_all((ROOT / "docs" / name).read_text())][-1]["spec"]
        container = job["template"]["spec"]["containers"][0]
        assert f"--nnodes={job['completions']} " in container["args"][0]
        command = ["srun", *container["command"],
                   f"JOB_COMPLETION_INDEX=$SLURM_NODEID; {container['args'][0]}"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120)
    is_host = []
    for path in tmp_path.glob("args.*"):
        args = parse_args(path.read_text().splitlines())
        launch = config_from_args(args)[0]
        assert launch.max_nodes == 2 and args.training_script == "train.py"
        assert re.fullmatch(r"(node1|train-0\.steady):\d+", args.rdzv_endpoint)
        is_host.append(launch.rdzv_configs["is_host"])
        cfg = config.parse(args.training_script_args)
        assert cfg.auto_resume and cfg.data != config.parse([]).data
    assert sorted(is_host) == ["0", "1"]


def requirements(name: str) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line]
    return [r for r in found if not r.marker or r.marker.evaluate()]


def test_requirements_keep_what_is_installed():
    """The README's first command leaves a torch of the user's own alone; tests pin another one."""
    ranges, pinned = requirements("requirements.txt"), requirements("requirements-dev.txt")
    assert all([s.operator for s in r.specifier] == ["=="] for r in pinned)
    pins = {r.name: next(iter(r.specifier)).version for r in pinned}
    for r in ranges:
        assert [s.operator for s in r.specifier] == [">="], r
        assert r.specifier.contains(importlib.metadata.version(r.name)), r
        assert r.specifier.contains(pins[r.name]), r
    assert next(r for r in ranges if r.name == "torch").specifier.contains("2.11.0+cu128")
    listed = re.search(r"^dependencies = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(),
                       re.DOTALL | re.MULTILINE)
    assert {str(r).lower() for r in ranges} == {
        str(Requirement(line)).lower() for line in json.loads(listed[1])}
    command = "pip install -r requirements-dev.txt && python -m pytest"  # .ci/run reads it there
    assert f"\n{command}\n" in HACKING and all(f"`{command}`" in t for t in (README, CHINESE))


PIECE = re.compile(r"\b[iI]n `(\w+\.py)`,\sreplace\n\n```python\n(.*?)```\n\n"
                   r"with\n\n```python\n(.*?)```$", re.DOTALL | re.MULTILINE)
RECIPES = {section.partition("\n")[0].removeprefix("Another "): PIECE.findall(section)
           for section in HACKING.split("\n## ") if PIECE.search(section)}  # (file, text, new text)
WITH_PAIRS = "Preference tuning"  # see test_forks.py


def apply(pieces: list[tuple[str, str, str]], clone: Path):
    for file, old, new in pieces:
        text = (clone / file).read_text()
        assert text.count(old) == 1, (file, old)
        (clone / file).write_text(text.replace(old, new))


def run_in(clone: Path, *flags, before=lambda: None, expect=0) -> str:
    """What train.py prints in a copy of the repository, with TINY and without samples."""
    process = in_clone(clone, [*TINY, "--sample_interval", 0, *flags], before)
    assert process.code() == expect, process.text()
    return process.text()


def train_in(clone: Path, corpus: Path, out: str = "r", *flags: str) -> dict[int, float]:
    run_in(clone, "--log_interval", 1, "--data", corpus, "--out_dir", out, "--save_interval", 6,
           *flags)
    return column(clone / out, "train/loss")


@pytest.fixture(scope="module")
def unchanged(corpus, tmp_path_factory) -> dict[int, float]:
    assert sum(map(len, RECIPES.values())) == HACKING.count("replace\n\n```python") == 16
    return train_in(copy_files(tmp_path_factory.mktemp("unchanged") / "clone"), corpus)


@pytest.mark.parametrize("what", [what for what in RECIPES if what != WITH_PAIRS])
def test_recipes_apply_and_train(tmp_path, corpus, unchanged, what):
    clone = copy_files(tmp_path / "clone")
    apply(RECIPES[what], clone)
    after = train_in(clone, corpus)
    assert after[12] < after[1]
    rows = {"evaluation": ("val/accuracy", 1), "metric": ("health/head_norm", 12)}
    name, n = rows.get(what, ("", 0))
    assert (after == unchanged) == (n > 0)  # they watch and change nothing
    assert len(column(clone / "r", name)) == n
    if what == "Generated data":
        assert ": additions, number " in shell("python data.py show r 3", clone)
    if what in ("loss", "Generated data", "A length that changes"):
        resumed = train_in(clone, corpus, "s", "--resume", "r/checkpoints/step_00000006.pt")
        assert resumed == {step: loss for step, loss in after.items() if step > 6}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_files_exist(page):
    text = PAGES[page]
    options = (config.Config, prepare.Options, *generate.COMMANDS.values())
    known = {f.name for kind in options for f in dataclasses.fields(kind)}
    known |= {f"no_{name}" for name in known} | {"help", "help_all"}
    # of torchrun, sbatch and lm_eval; --monitor beside torchrun
    known |= set("nproc_per_node max_restarts nnodes local_addr rdzv_backend rdzv_endpoint rdzv_id "
                 "rdzv_conf signal requeue open_mode model_args include_path tasks monitoring "
                 "monitor_interval".split())
    for script in ("tools/report.py", "tools/compare.py", "tests/bench/__main__.py"):
        known |= set(re.findall(r"\"--(\w+)\"", (ROOT / script).read_text()))
    flags = re.findall(r"(?<![\w-])--([a-z][a-z0-9_-]*[a-z0-9])", text)
    assert {flag.replace("-", "_") for flag in flags} - known == set()
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
        assert (page.parent / link).exists(), link
    for anchor in re.findall(r"\]\(([\w.-]*\.md#[\w-]+)\)", text):
        file, _, name = anchor.partition("#")
        titles = re.findall(r"^##+ (.*)$", (page.parent / file).read_text(), re.MULTILINE)
        assert name in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles], anchor


def test_map_names_every_file():
    """Or its folder; and each of them once."""
    rows = [line.split("|")[1] for line in README.splitlines()
            if re.match(r"\| `[\w/]+(\.py|/)`", line)]
    named = [name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)]
    files = [*ROOT.glob("*.py"), *(ROOT / "steady").glob("*.py")]
    actual = [path.relative_to(ROOT).as_posix() for path in files if path.name != "__init__.py"]
    folders = {f"steady/{path.parent.name}/" for path in (ROOT / "steady").glob("*/*.py")}
    assert sorted(named) == sorted([*actual, *folders, "tools/"])


def test_the_loop_is_that_of_train():
    """Without some of its lines and all of its comments."""
    def code(text: str) -> list[str]:
        return [line.partition("  # ")[0].strip() for line in text.splitlines()]

    source = iter(code((ROOT / "train.py").read_text()))
    missing = [line for line in code(blocks(README, "python")[0]) if line not in source]
    assert missing == [], "not in train.py, or not in this order"


def test_warning_is_as_printed():
    """The numbers are from a real run, so only the words can grow old."""
    line = Finding("line", values={"source": "copied = tokens.clone()"}, ms=13.0,
                   line="my_data.py:6 augment < data.py:132 Samples.rows")
    event = Finding("slower", 401, dict(percent=39, phases=[("data", 14.1)], creeps=False), ms=14.1,
                    of=36.3, side="program", parts=(line, Finding("data", ms=1.1)))
    assert f"warning: step 540: {event}\n" in blocks(README)


def test_both_readmes_have_the_same_commands_and_links():
    def sections(text: str) -> list[list[str]]:
        return [sorted(inline_code(part)) for part in text.split("\n## ")]

    def whole_commands(text: str) -> list[str]:
        return [code for code in inline_code(text) if re.match("python |pip |torchrun ", code)]

    assert blocks(README) == blocks(CHINESE)
    assert whole_commands(README) == whole_commands(CHINESE)
    # within a section, sentences may name them in another order
    for english, chinese in zip(sections(README), sections(CHINESE), strict=True):
        assert english == chinese
    assert "(README.zh-CN.md)" in README and "(README.md)" in CHINESE
    for page in PAGES:
        if page.parent.name == "docs":
            assert f"(docs/{page.name})" in README and f"(docs/{page.name})" in CHINESE
            assert "(../README.md)" in PAGES[page]


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of the table under a title."""
    table = [line for line in text.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines()
             if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_figures_are_those_on_record():
    records = json.loads((ROOT / "tests/bench/results/cpu.json").read_text())
    measured = {name: [Figure(**figure).row() for figure in record["figures"]]
                for name, record in records.items()}
    listed = cells(PAGES[ROOT / "docs/benchmarks.md"], "All figures")
    assert listed == [row for rows in measured.values() for row in rows]
    for text, title in ((README, "Figures"), (CHINESE, "性能数据")):
        shown = cells(text, title)
        assert len(shown) == 4
        for *_, ratio, spread, command in shown:
            name = re.search(r"tests\.bench (\w+)", command)[1]
            assert [ratio, spread.replace("～", " to ")] in [row[2:4] for row in measured[name]]
