"""What the tests share: a small corpus, a way to run the real program, and small configurations."""

import contextlib
import gc
import io
import itertools
import json
import math
import os
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
sys.path.insert(0, str(ROOT))

import config  # noqa: E402
import data  # noqa: E402
import steady.models.device  # noqa: E402
import train  # noqa: E402
from steady.checkpoints.checkpoint import checkpoint_at, compare, list_checkpoints  # noqa: E402
from steady.guard.process import exit_code  # noqa: E402
from steady.guard.process import run as run_and_leave  # noqa: E402
from steady.tokens.files import write_tokens  # noqa: E402

# One, unless asked: the models are tiny, and two processes of two spinning threads each are thirty
# times slower on two cores.
THREADS = os.environ.get("STEADY_TEST_THREADS", "1")
torch.set_num_threads(int(THREADS))

# In the background of a shell, or under nohup, they are ignored, also in what is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# One of 40 tokens takes a seventh of a run of 12 steps, and a third where weights are gathered.
whole_sample = train.sample
train.sample = partial(whole_sample, max_new_tokens=4)

if "STEADY_TEST_BF16" in os.environ:  # 0 or 1: as on a CPU without, or with, bf16 instructions
    multiplies_bf16 = os.environ["STEADY_TEST_BF16"] == "1"
    steady.models.device.multiplies_bf16 = lambda device: multiplies_bf16

# A model and a run that take milliseconds a step. Not `--precision auto`, which is bf16 on some
# CPUs and fp32 on others; a test of another precision adds its own, and the last one wins.
TINY = ["--n_layer", "2", "--n_head", "2", "--n_kv_head", "1", "--d_model", "32", "--d_ff", "64",
        "--seq_len", "32", "--batch_size", "8", "--max_steps", "12", "--warmup_steps", "2",
        "--eval_steps", "2", "--log_interval", "4", "--precision", "fp32", "--no_tensorboard"]


def tiny_config(**changes) -> config.Config:
    return replace(config.resolve(config.parse([*TINY, "--vocab_size", "257"])), **changes)


@pytest.hookimpl(optionalhook=True)  # there may be no xdist where only some tests are run
def pytest_xdist_auto_num_workers(config) -> int:
    """Two processes for all of the tests; for some of them none, which start at once."""
    everything = config.args_source == config.ArgsSource.TESTPATHS and not config.option.keyword
    return min(2, steady.models.device.usable_cores()) if everything else 0


def pytest_unconfigure(config):
    gc.unfreeze()  # what is frozen is never freed, and Triton's modules print that at the end


@pytest.fixture(scope="session", autouse=True)
def compiler():
    """Which an optimizer's first step imports: here once, and not in every fork."""
    import torch._dynamo  # noqa: F401


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with train.bin and val.bin: lines of arithmetic, which a model can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = ["".join(f"{a} + {b} = {a + b}\n" for b in range(60)).encode() for a in range(60)]
    write_tokens(folder / "train.bin", texts[:54])
    write_tokens(folder / "val.bin", texts[54:])
    return folder


@pytest.fixture
def other_validation(corpus, tmp_path) -> Path:
    """A copy of the corpus whose validation data are its training data."""
    folder = Path(shutil.copytree(corpus, tmp_path / "other"))
    for path in corpus.glob("train.bin*"):
        shutil.copy(path, folder / path.name.replace("train", "val"))
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """Of the run that the test's module makes once."""
    return Path(shutil.copytree(finished, tmp_path / "r"))


@pytest.fixture
def start(corpus, tmp_path):
    """start(*flags) → the processes of a run in tmp_path, with TINY and the corpus unless `bare`.

    As many as ranks; hook(rank) is called in each of them first.
    """
    def start(*flags, bare=False, ranks=1, hook=None, port=None) -> list[Process]:
        flags = [*([] if bare else [*TINY, "--data", corpus]), *flags]
        return processes(tmp_path, ranks, flags, hook, port)

    return start


@pytest.fixture
def run(start, corpus, tmp_path, monkeypatch):
    """run(*flags) → what the program printed, run in tmp_path with TINY and the corpus.

    bare: without either. expect: the exit code. ranks: processes; hook(rank) is called in each of
    them first. All of them do what `python train.py` does, but in this process or a fork of it,
    which saves the seconds that importing torch takes.
    """
    monkeypatch.chdir(tmp_path)

    def run(*flags, bare=False, ranks=1, expect=0, hook=None):
        flags = [*([] if bare else [*TINY, "--data", str(corpus)]), *map(str, flags)]
        if ranks > 1 or hook:
            group = start(*flags, bare=True, ranks=ranks, hook=hook)
            codes = [process.code() for process in group]
            printed = "".join(process.text() for process in group)
            for process in group:
                process.log.unlink()
            assert codes == [expect] * ranks, printed
            return printed
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = exit_code(train.main, flags)
        tidy()
        assert code == expect, output.getvalue()
        return output.getvalue()

    return run


@pytest.fixture
def tool(capsys):
    """tool(main, *arguments, expect=0) → what that command printed: (out, err)."""

    def tool(main, *arguments, expect=0):
        capsys.readouterr()
        code = main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert code == expect, printed
        return printed

    return tool


def poison(first: int, stop: int):
    """From now on the losses of samples `first` to `stop` - 1 are not finite; for a hook."""
    import data  # in a copy of the repository, those of the copy
    import model

    change(data.Mixture, "batch", lambda found, _, start, end: found._replace(
        tokens=found.tokens * 0) if first <= start < stop else found)
    change(model.Transformer, "forward", lambda losses, _, tokens, *more: (
        losses if tokens.any() else losses * math.nan))


runs_made = itertools.count(1)


def tidy():
    """After a run, which turns the collector off and freezes what is alive.

    Not unfrozen each time, or every run would traverse all that its predecessors imported.
    """
    gc.enable()
    if next(runs_made) % 100 == 0:  # 1.4 MB each
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def environment() -> dict[str, str]:
    """For interpreters of their own, whose scripts may import this module."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {**os.environ, "OMP_NUM_THREADS": THREADS, "PYTHONPATH": path}


def python(*argv, folder: Path = ROOT, expect=0, **variables) -> tuple[str, str]:
    """What an interpreter of its own prints: (out, err). variables: of the environment."""
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=folder,
                          env=environment() | variables, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout, done.stderr


def in_clone(clone: Path, argv: list, before=lambda: None, **ranks) -> "Process":
    """`python train.py argv` of a copy of the repository, in a fork, which has torch already.

    before: called first, where it can import the modules of the copy. ranks: as for `Process`.
    """
    def hook():
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(ROOT)):
                del sys.modules[name]
        sys.path[:] = [str(clone), *(p for p in sys.path if Path(p).resolve() != ROOT)]
        sys.argv = ["train.py", *map(str, argv)]
        before()
        try:
            runpy.run_path("train.py", run_name="__main__")
        except SystemExit as end:  # the only way it should end
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        raise AssertionError("train.py returned")

    return Process(clone, [], hook, **ranks)


def before(owner, name: str, do, put=setattr, then=lambda *_: None):
    """From now on `do(*args)` precedes each call of `owner.name`, or raises in its place, and
    `then(*args)` follows it."""
    plain = getattr(owner, name)

    def call(*args, **options):
        do(*args)
        found = plain(*args, **options)
        then(*args)
        return found

    put(owner, name, call)


def after(owner, name: str, do, put=setattr):
    """From now on `do(*args)` follows each call of `owner.name`."""
    before(owner, name, lambda *_: None, put, do)


def change(owner, name: str, how, put=setattr):
    """From now on each call of `owner.name` returns how(what it would have returned, *args)."""
    plain = getattr(owner, name)
    put(owner, name, lambda *args, **options: how(plain(*args, **options), *args))


def raising(error: BaseException):
    """A function that raises this error, whatever its arguments."""
    def fail(*args, **how):
        raise error

    return fail


def after_updates(do, put=setattr):
    """From now on `do(run)` follows the update of each step."""
    after(train.Run, "advance", do, put)


def after_step(step: int, do, put=setattr):
    """From now on `do()` follows the update of this step."""
    after_updates(lambda run: run.progress.step == step and do(), put)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def column(run_dir: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows(run_dir) if name in row}


def steps(run_dir: Path) -> list[int]:
    """Of its checkpoints."""
    return [checkpoint.step for checkpoint in list_checkpoints(run_dir / "checkpoints")]


def saved(run_dir: Path, step=None) -> dict:
    """What the checkpoint of this step holds, by default the newest."""
    folder = run_dir / "checkpoints"
    return (checkpoint_at(folder, step) if step else list_checkpoints(folder)[-1]).state()


def assert_same_end(one: Path, two: Path, *also: str, step=None):
    a, b = saved(one, step), saved(two, step)
    for name in ("step", "position", "model", "ema", "optimizers", "scaler", *also):
        assert compare(a[name], b[name], name)[1] == []


def contents(folder: Path, *without: str) -> dict[str, bytes]:
    """All files below a folder, but those of these names."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name not in without}


@contextlib.contextmanager
def largest_file(size: int):
    """No file may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def samples_seen(monkeypatch) -> dict[int, tuple]:
    """From now on: the data set and the tokens of the sample at each position."""
    seen = {}

    def note(found, self, start, stop):
        source = [0] * (stop - start) if found.source is None else found.source
        samples = zip([self.datasets[k].name for k in source], found.tokens.tolist(), strict=True)
        seen.update(zip(range(start, stop), samples, strict=True))
        return found

    change(data.Mixture, "batch", note, monkeypatch.setattr)
    return seen


def events_of(folder: Path):
    """What TensorBoard reads there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def until(holds, seconds=120) -> bool:
    """Wait until it holds; whether it did in time."""
    for _ in range(int(seconds * 100)):
        if holds():
            return True
        time.sleep(0.01)
    return False


def wait_for(path, seconds=120):
    assert until(path.exists, seconds), f"{path} did not come"


class Process:
    """train.py in a fork of this process, which has torch imported already: it starts at once.

    hook: called in it first. rank, ranks, port: what torchrun would say in the environment.
    """

    def __init__(self, folder: Path, flags, hook=None, rank=0, ranks=1, port=0, log="log.txt"):
        self.log = folder / log
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            torch.set_num_threads(1)  # OpenMP's other threads do not survive a fork
            os.setsid()
            os.chdir(folder)
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            if ranks > 1:
                os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                                   LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                                   MASTER_PORT=str(port))
            if hook:
                hook()
            sys.argv = ["train.py", *map(str, flags)]
            run_and_leave(train.main)
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        return bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def ends_within(self, seconds: int) -> bool:
        return until(self.has_ended, seconds)

    def code(self, seconds=300) -> int:
        """The exit code, or minus the signal that ended it; killed where it takes too long."""
        if self.ends_within(seconds):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.killpg(self.pid, 9)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it hangs: {self.text()}")

    def wait_for(self, words: str, seconds=120):
        """Until it has printed them, or has ended."""
        until(lambda: words in self.text() or self.has_ended(), seconds)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def finished_run(folder: Path, corpus: Path, *flags, ranks=1) -> Path:
    """The directory of a run there, with TINY and the corpus."""
    for process in processes(folder, ranks, [*TINY, "--data", corpus, "--out_dir", "r", *flags]):
        assert process.code() == 0, process.text()
    return folder / "r"


def processes(folder: Path, ranks: int, flags, hook=None, port=None) -> list[Process]:
    """One process a rank, as torchrun would start them; hook is called with the rank."""
    port = port or free_port()
    return [Process(folder, flags, hook and (lambda r=r: hook(r)), r, ranks, port, f"log{r}.txt")
            for r in range(ranks)]
