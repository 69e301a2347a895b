"""The monitor in loops that are not ours: copied into an empty folder, as docs/any-loop.md says."""

import importlib.util
import math
import re
import shutil
import signal
import sys
import threading
from functools import partial

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, column, events_of, rows

from monitor import Monitor
from steady.watch.history import OUTSIDE_PHASES, PHASES

python = partial(conftest.python, PYTHONPATH="")  # nothing of this repository but what is copied
DOCS = (ROOT / "docs" / "any-loop.md").read_text("utf-8")
EVERY, PLANTED, LATE_STEPS, STEPS = 10, 221, 400, 130

MODEL = """
import sys, time
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from monitor import Monitor

planted, first, last, die_at = map(int, sys.argv[1:])
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""

PLAIN = MODEL + """
def load(step):
    if step >= planted:
        time.sleep(0.04)
    return torch.randint(64, (2, 16))

monitor = Monitor("run", log_interval=10, last_step=last)
for step in range(first, last + 1):
    monitor.phase("data")
    batch = load(step)
    monitor.phase("forward")
    loss = model(batch, labels=batch).loss
    monitor.phase("backward")
    loss.backward()
    monitor.phase("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(step, loss=loss, tokens=batch.numel())
    if step == die_at:
        raise RuntimeError("it dies")
monitor.close()
"""

NANOGPT = MODEL + """
def get_batch():
    return torch.randint(64, (4, 16))

def noise(*_):
    if iter_num >= planted:
        time.sleep(0.02)

model.model.register_forward_pre_hook(noise)
iter_num, X = first, get_batch()
monitor = Monitor('run', 10, last_step=last)
while True:
    if iter_num % 100 == 0:
        monitor.phase('evaluation')
        val = sum(model(x, labels=x).loss.item() for x in (get_batch(), get_batch()))
        torch.save(model.state_dict(), 'run/ckpt.pt') if iter_num else None
    for micro_step in range(2):
        monitor.phase('forward')
        loss = model(X, labels=X).loss / 2
        monitor.phase('data')
        X = get_batch()
        monitor.phase('backward')
        loss.backward()
    monitor.phase('optimizer')
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    monitor.phase('other')
    monitor.step(iter_num, loss=loss * 2, tokens=2 * X.numel())
    if iter_num == die_at:
        raise RuntimeError("it dies")
    iter_num += 1
    if iter_num > last:
        break
monitor.close()
"""

TRAINER = MODEL + """
from transformers import Trainer, TrainingArguments
from callback import Phases

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * last

    def __getitem__(self, i):
        if trainer.state.global_step + 1 >= planted:
            time.sleep(0.01)
        if trainer.state.global_step == die_at:
            raise RuntimeError("it dies")
        row = torch.full((16,), i % 64)
        return dict(input_ids=row, labels=row)

held = [dict(input_ids=torch.full((16,), i), labels=torch.full((16,), i)) for i in range(8)]
args = TrainingArguments("out", max_steps=last, per_device_train_batch_size=2, report_to=[],
                         gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=100,
                         save_steps=100, save_total_limit=1, logging_steps=50, use_cpu=True,
                         disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=Rows(), eval_dataset=held)
EXTRA
"""
USE = re.search(r"```python\n(monitor = .*?)```", DOCS[DOCS.index("Hugging Face"):], re.S)[1]
CALLBACK = re.search(r"```python\n(from functools.*?)```", DOCS, re.S)[1]
TRAINER = TRAINER.replace("EXTRA", USE.replace('"runs/mine"', '"run", 10'))
LOOPS = {"plain": (PLAIN, "load"), "nanogpt": (NANOGPT, "noise"),
         "trainer": (TRAINER, "Rows.__getitem__")}


@pytest.fixture(params=LOOPS)
def loop(request, tmp_path):
    """loop(planted, first, last, die_at=0) → (run directory, printed, the function to be named)."""
    if request.param == "trainer" and not importlib.util.find_spec("accelerate"):
        pytest.skip("needs accelerate")
    script, function = LOOPS[request.param]
    shutil.copy(ROOT / "monitor.py", tmp_path)
    shutil.copytree(ROOT / "steady" / "watch", tmp_path / "steady" / "watch",
                    ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "steady" / "__init__.py").touch()
    (tmp_path / "loop.py").write_text(script)
    (tmp_path / "callback.py").write_text(CALLBACK)

    def loop(planted, first, last, die_at=-1):
        printed, _ = python("loop.py", planted, first, last, die_at, folder=tmp_path,
                            expect=die_at >= 0)
        return tmp_path / "run", printed, function

    loop.name = request.param
    return loop


def lines_of(findings: list[dict], code: str) -> list[str]:
    """The lines named by findings of this code, the largest part of each first."""
    return [part["line"] for found in findings if found["code"] == code
            for part in found["parts"] if part["code"] == "line"]


def check_columns(run_dir):
    logs = [row for row in rows(run_dir) if "perf/step_ms" in row]
    for row in logs:
        parts = [row.get(f"perf/{name}_ms", 0) for name in PHASES if name not in OUTSIDE_PHASES]
        assert sum(parts) == pytest.approx(row["perf/step_ms"], rel=1e-6), row
        assert row["train/loss"] > 0 and row["perf/tokens_per_second"] > 0
    for name in ("data", "forward", "backward", "optimizer"):
        assert all(row[f"perf/{name}_ms"] > 0 for row in logs[1:]), name
    events = events_of(run_dir / "tensorboard")
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(column(run_dir, "train/loss"), rel=1e-5)


@pytest.mark.parametrize("loop", ["plain", *(pytest.param(name, marks=pytest.mark.slow)
                                             for name in ("nanogpt", "trainer"))], indirect=True)
def test_its_rows_and_its_lines(loop):
    steps = 60 if loop.name == "plain" else STEPS  # the others evaluate after 100
    run_dir, _, function = loop(0, 0, steps)  # as nanoGPT counts; a Trainer from 1
    check_columns(run_dir)
    looks = [place for row in rows(run_dir) for lines in row.get("profile", {}).values()
             for place in lines]
    assert any(re.match(rf"\S*loop.py:\d+ {function}", place) for place in looks), looks
    assert "verdict" in python("monitor.py", "run", folder=run_dir.parent)[0]
    assert "RUN_DIR" in python("monitor.py", folder=run_dir.parent, expect=1)[1]
    assert "no metrics" in python("monitor.py", "--html", folder=run_dir.parent, expect=1)[1]


@pytest.mark.timed
@pytest.mark.parametrize("code, planted, first, last", [("slow", 0, 0, STEPS),
                                                        ("slower", PLANTED, 1, LATE_STEPS)])
def test_its_slow_line_is_named(loop, code, planted, first, last):
    run_dir, printed, function = loop(planted, first, last)
    check_columns(run_dir)
    found = [row["finding"] for row in rows(run_dir) if "finding" in row]
    named = lines_of(found, code)
    assert named and re.fullmatch(rf"\S*loop.py:\d+ {function}", named[0].split(" < ")[0]), found
    assert named[0] in python("monitor.py", "run", folder=run_dir.parent)[0]
    if code == "slow":
        assert named[0] in printed
    else:
        (since,) = {f["since"] for f in found if lines_of([f], "slower")}
        assert abs(since - PLANTED) <= 3 * 2 * EVERY
        assert "slow" not in [f["code"] for f in found]


@pytest.mark.slow
def test_a_loop_that_dies_is_continued_or_begun_again(loop):
    """Without a call of close."""
    run_dir, _, _ = loop(10**6, 1, 60, 34)
    before = column(run_dir, "train/loss")
    assert max(before) == 30
    events = events_of(run_dir / "tensorboard").Scalars("train/loss")
    assert [event.step for event in events] == list(before)
    if loop.name != "plain":
        return
    loop(10**6, 21, 60)  # as from a checkpoint of step 20
    after = column(run_dir, "train/loss")
    assert list(after) == sorted({*after}) == [1, 10, 20, 21, 30, 40, 50, 60]
    assert {k: before[k] for k in (1, 10, 20)} == {k: after[k] for k in (1, 10, 20)}
    shown = [event.step for event in events_of(run_dir / "tensorboard").Scalars("train/loss")]
    assert shown == list(after)
    loop(10**6, 1, 20)
    assert list(column(run_dir, "train/loss")) == [1, 10, 20]
    assert sum(row.get("lost_s", 0) for row in rows(run_dir)) > 0


@pytest.mark.parametrize("value, mean", [
    (torch.tensor(1).bfloat16(), 1.0), (torch.tensor(2**15).half(), 2**15),
    (torch.ones(3), 1.0), (np.arange(3), 1.0), ([1, 2], 1.5), (np.float32(2), 2.0),
    ("x", math.nan), (None, math.nan), (torch.ones(2, device="meta"), math.nan)])
def test_any_value_is_a_number_in_the_file(value, mean, tmp_path):
    m = Monitor(tmp_path, 600, tensorboard=False)
    for step in range(1, 601):
        m.log(7, value)  # of class 7
        m.step(step, loss=1.0 if value is None else value, tokens=torch.tensor(7),
               grad_norm=2.0 if step % 2 else None)
    m.write(600, {"val/loss": torch.tensor(3.0)})
    m.close()
    assert m.history.evaluations == {600: 3.0}
    logged = [row["7"] for row in rows(tmp_path) if "perf/step_ms" in row]
    assert logged == [None if mean != mean else pytest.approx(mean)] * 2
    assert column(tmp_path, "train/tokens") == {1: 7, 600: 4200}
    assert m.healthy


def watched(folder, steps) -> Monitor:
    """The monitor of a loop of these steps."""
    m = Monitor(folder, 10, last_step=math.inf)
    for step in steps:
        m.step(step, loss=1.0)
    m.close()
    return m


@pytest.mark.parametrize("steps", [np.arange(1, 31), torch.arange(1, 31), np.arange(31.0)])
def test_a_step_may_be_any_whole_number(steps, tmp_path):
    m = watched(tmp_path, steps)
    logged = [int(steps[0]), 10, 20, 30]
    assert [row["step"] for row in m.history.rows] == list(column(tmp_path, "train/loss")) == logged


def test_the_settings_of_the_program_stay_its_own(tmp_path, monkeypatch):
    own = print  # takes any arguments
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGCONT)}
    monkeypatch.setattr(threading, "excepthook", own)
    signal.signal(signal.SIGUSR2, own)
    try:
        monitors = [Monitor(tmp_path / name, 1) for name in "ab"]
        for step in range(1, 30):
            for m in monitors:
                m.step(step, loss=1.0)
        assert signal.getsignal(signal.SIGUSR2) is own
        signal.signal(signal.SIGCONT, own)
        for m in reversed(monitors):
            m.close()
        assert signal.getsignal(signal.SIGUSR2) is signal.getsignal(signal.SIGCONT) is own
        assert threading.excepthook is own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("place", ["file", "file/run", "run"])
def test_a_folder_that_cannot_be_used_ends_no_training(place, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    watched(tmp_path / place, range(1, 31))


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    m = Monitor("run", 10)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    m.step(1, loss=1.0)
    assert m.close()
    assert column(tmp_path / "run", "train/loss") == {1: 1.0}


def test_steps_that_are_not_counted_by_ones_are_told_once(tmp_path, capsys):
    for by, warnings in ((1, 0), (128, 1)):
        watched(tmp_path / str(by), range(by, 40 * by, by))
        assert capsys.readouterr().out.count("count by ones") == warnings


def test_hours_before_a_run_in_a_notebook_are_not_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    history = watched(tmp_path, [1]).history
    assert history.last("perf/startup_s") == history.last("perf/step_ms") / 1e3
