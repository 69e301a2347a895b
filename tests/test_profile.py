"""Which line became slower: what the sampler sees, and what is made of it."""

import gc
import json
import math
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import rows, until
from test_causes import EVERY, PLANTED, STEP_MS, codes, detect, made

from steady.watch import profile
from steady.watch.causes import Cause
from steady.watch.profile import LEAST, OTHERS, Sampler, add_profiles, longer_lines
from steady.watch.report import report
from steady.watch.sinks import PHASES

FRAMES = []


class Watched(torch.nn.Module):
    def forward(self, x):
        FRAMES.append(sys._getframe())
        return x



@pytest.fixture(autouse=True)
def no_collections():
    """As while training: else the sampler does not look."""
    gc.disable()
    yield
    gc.enable()


def through_libraries(model):
    return json.loads("[1]", object_hook=None) and model(torch.ones(1))


@pytest.fixture
def sampler(monkeypatch):
    monkeypatch.setattr(profile.threading.Thread, "start", lambda self: None)
    return Sampler(SimpleNamespace(current="forward"))


def test_a_look_skips_torch_and_the_standard_library(sampler):
    outer = Watched()
    through_libraries(outer)
    frame = FRAMES.pop()
    for _ in range(LEAST - 1):
        sampler.look(frame)
    assert sampler.take() == {}  # too few yet
    sampler.look(frame)
    (line,) = sampler.take()["forward"]
    inner, caller = line.split(" < ")  # with torch's own Module.__call__ between them
    assert inner.startswith("tests/test_profile.py:") and inner.endswith(" Watched.forward")
    assert caller.startswith("tests/test_profile.py:") and caller.endswith(" through_libraries")
    assert sampler.take() == {}
    sampler.look(None)  # a thread that has ended
    assert sampler.counts


@pytest.mark.parametrize("file, shown", [
    (f"{profile.LIBRARY}/site-packages/transformers/modeling.py", "transformers/modeling.py:1 f"),
    ("/home/me/project/my_data.py", "project/my_data.py:1 f"),
    (f"{profile.ROOT}/steady/ranks/muon.py", "steady/ranks/muon.py:1 f"),
    (f"{profile.LIBRARY}/json/decoder.py", "tests/test_profile.py:"),
    ("<eval_with_key>.3", "tests/test_profile.py:"),
])
def test_which_files_are_named(sampler, file, shown):
    space = {"sys": sys}
    exec(compile("def f(): return sys._getframe()", file, "exec"), space)
    frame = space["f"]()
    for _ in range(LEAST):
        sampler.look(frame)
    (line,) = sampler.take()["forward"]
    assert line.startswith(shown)


def test_it_looks_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(profile, "SECONDS", 0.001)
    before, others = sys.getswitchinterval(), set(threading.enumerate())
    sampler = Sampler(SimpleNamespace(current="data"))
    (thread,) = set(threading.enumerate()) - others
    assert until(lambda: sampler.counts.total() > 3)
    assert thread.is_alive() and sys.getswitchinterval() == pytest.approx(profile.SWITCH_SECONDS)
    sampler.close()
    assert sys.getswitchinterval() == before
    assert until(lambda: not thread.is_alive())


def test_a_run_writes_where_its_looks_were(run, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "SECONDS", 0.001)
    monkeypatch.setattr(profile, "LEAST", 1)
    run("--out_dir", "r", "--log_interval", 4)
    found = add_profiles(rows(tmp_path / "r"))
    assert found and found.keys() <= {*PHASES}
    places = {name for lines in found.values() for name in lines}
    assert any("train.py:" in name for name in places), places
    run("--out_dir", "off", "--monitoring", "off")
    assert not add_profiles(rows(tmp_path / "off"))


def profiles(slower: str, ms: float, looks: int = 40):
    """Looks at a forward pass of three lines; one takes so many ms more once it is late."""
    usual = {"attend": 3.0, "project": 3.0, "norm": 1.5}  # of 0.3 STEP_MS

    def more(late: bool) -> dict:
        lines = {name: t + (ms if late and name == slower else 0.0) for name, t in usual.items()}
        total = sum(lines.values())
        return {"profile": {"forward": {f"model.py:{i} {name} < model.py:9 forward":
                                        round(looks * t / total)
                                        for i, (name, t) in enumerate(lines.items())}}}

    return more


@pytest.mark.parametrize("slower", ["attend", "norm"])
def test_the_line_that_became_slower_is_named(slower):
    share = 0.2
    found, _ = detect(made(1, phase="forward", share=share,
                           more=profiles(slower, share * STEP_MS)))
    (event,) = [event for event in found if event.blames == "program"]
    assert codes(event) == ["line"] and event.since <= (PLANTED + 3) * EVERY
    line = event.causes[0].values["line"]
    assert line.phase == "forward" and f" {slower} < model.py:9 forward" in line.place
    assert abs(line.ms - share * STEP_MS) < max(line.error, 0.2 * share * STEP_MS)


def test_lines_that_keep_their_shares_are_not_blamed():
    """All of them longer alike, as on a slower machine, or beside work that no look has met."""
    found, _ = detect(made(1, factor=1.5, more=profiles("none", 0.0)))
    assert found and not any("line" in codes(event) for event in found)


def test_profiles_that_nobody_has_written_are_passed_over(tmp_path):
    odd = [{}, {"forward": 3}, {"forward": {"a.py:1 f": "many"}}, {"": {"x": 2}}, [1], "text", None,
           {"forward": {"a.py:1 f": True, "b": -1, "c": 10**400}}]
    made_rows = made(1, phase="forward", share=0.3)
    lines = [json.dumps(row | {"profile": odd[i % len(odd)]}) for i, row in enumerate(made_rows)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (event,) = report(tmp_path)["slowdowns"]
    assert codes(event) == ["unexplained"]


def test_of_a_function_the_line_that_has_grown_is_named():
    """It took less than the others before; a third line is met only after the change."""
    looks = ({"m.py:1 f": 60, "m.py:2 f": 10, "m.py:9 g": 30},
             {"m.py:1 f": 60, "m.py:2 f": 110, "m.py:3 f": 5, "m.py:9 g": 30, OTHERS: 5})
    line, other = longer_lines("forward", [10.0, 21.0], looks, 1.0)
    assert line.place == "m.py:2 f" and line.ms == pytest.approx(17.5 - 7.0)
    assert other.place == "m.py:9 g" and abs(other.ms) < 1e-9
    # binomial: 2 sqrt(p (1 - p) / n) of the phase, before and after
    assert line.error == pytest.approx(math.hypot(
        2 * 10 * math.sqrt(0.7 * 0.3 / 100), 2 * 21 * math.sqrt((175 / 210) * (35 / 210) / 210)),
        rel=0.03)
    slower, _ = longer_lines("forward", [10.0, 21.0], looks, 1.5)
    assert slower.ms == pytest.approx(17.5 - 1.5 * 7.0)


def test_a_line_of_a_phase_that_hardly_took_time_before():
    looks = {}, {"data.py:5 augment < data.py:9 batch": 30, "data.py:9 batch < train.py:1 train": 3}
    line, other = longer_lines("data", [0.1, 5.0], looks, 1.0)
    assert line.place.startswith("data.py:5 augment") and line.ms == pytest.approx(4.5, abs=0.1)
    assert line.error < 1.5 and other.ms < 1.0
    assert longer_lines("data", [0.1, 5.0], ({}, {"data.py:5 augment": 3}), 1.0) == []  # too few
    assert "data.py:5 augment < data.py:9 batch" in str(Cause("line", 4.5, {"line": line}))
