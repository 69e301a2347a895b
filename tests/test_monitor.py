"""The monitor reports what happened. Time passes on a clock that the tests drive."""

import gc
import pickle
import re
import sys
import time

import numpy as np
import pytest
import torch
from conftest import column, events_of, raising, rows

import monitor
import train
from monitor import Monitor
from steady.models import device
from steady.watch import clock as clocks
from steady.watch import machine, proc, sampler
from steady.watch import sinks as telemetry
from steady.watch.clock import DeviceTimes
from steady.watch.gather import slowest_rank
from steady.watch.history import OWN_PHASES, read_rows
from steady.watch.report import report, report_text
from steady.watch.trends import Spikes

CPU = torch.device("cpu")


class Clock:
    """Stands in for the module `time` in the monitor: time passes only where a test says so.

    tick: seconds that each reading takes; with it the steps of a real run take a constant time.
    """

    def __init__(self, monkeypatch, tick: float = 0.0):
        self.now, self.tick = 0.0, tick
        self.start_process(monkeypatch)
        for module in (clocks, telemetry, machine, monitor):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(sampler.Sampler, "read", lambda *_: {})  # of real time

    def start_process(self, monkeypatch):
        """From now on the monitor believes to be in a process that was started this moment."""
        began = self.now
        monkeypatch.setattr(proc, "process_age_seconds", lambda: self.now - began)
        monkeypatch.setattr(monitor, "accounted_s", 0.0)

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float):
        self.now += seconds

    def __getattr__(self, name):  # other clocks
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def make(out_dir, start_step=0, max_steps=8, **options) -> Monitor:
    options = dict(log_interval=4, flops_per_token=10**6, tensorboard=False) | options
    m = Monitor(out_dir, device=CPU, first_step=start_step + 1, last_step=max_steps, **options)
    if m.parts:
        m.sampler.close()  # it looks in real time
    return m


def step(m, step, loss=1.0, grad_norm=1.0, tokens=1000, real_tokens=1000):
    m.real_tokens = getattr(m, "real_tokens", 0) + real_tokens
    m.columns = lambda: {"train/tokens": m.real_tokens}
    m.step(step, lr=0.1, loss=torch.tensor(loss), grad_norm=torch.tensor(grad_norm), tokens=tokens)


def logs(folder) -> list[dict]:
    return [row for row in rows(folder) if "perf/step_ms" in row]


def spend(m, clock, **ms):
    """Let so many ms pass in each of these phases."""
    for name, value in ms.items():
        m.phase(name)
        clock.advance(value / 1e3)
    m.phase("other")


def test_phases_are_the_time_that_passed_in_them(tmp_path, capsys, clock):
    """In the file, in TensorBoard, and in the line that is printed."""
    m = make(tmp_path, peak_flops=1e9, level="full", max_steps=10**6, tensorboard=tmp_path / "tb")
    for n in range(1, 9):
        spend(m, clock, data=10 * n, forward=20, backward=30, optimizer=5)
        previous = m.phase("evaluation")
        clock.advance(0.05)
        m.phase(previous)
        assert previous == "other"
        step(m, n)
    row = rows(tmp_path)[-1]
    expected = dict(data=65, forward=20, backward=30, optimizer=5, other=0)
    assert {name: row[f"perf/{name}_ms"] for name in expected} == pytest.approx(expected)
    assert row["perf/evaluation_ms"] == pytest.approx(50)
    assert row["perf/step_ms"] == pytest.approx(120)  # evaluation is not part of a step
    assert row["perf/step_ms_median"] == pytest.approx(125)
    assert row["perf/tokens_per_second"] == pytest.approx(1e6 / 120)
    assert row["perf/tflops"] == pytest.approx(1e6 / 120 * 1e6 / 1e12)
    assert row["perf/mfu"] == pytest.approx(row["perf/tflops"] * 1e12 / 1e9)
    assert row["perf/data_fraction"] == pytest.approx(65 / 120)
    assert row["perf/compute_fraction"] == pytest.approx(55 / 120)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "step       8/1000000 | loss 1.0000 | lr 1.00e-01 | grad 1 | 120.0 ms | 8.33k tok/s | "
        f"mfu 833.3% | data 54.2% | rss {row['memory/host_rss_gb']:.2f} GB | "
        "left 33h19m")  # 120 ms times a million, less eight
    m.close()
    events = events_of(tmp_path / "tb")
    for row in rows(tmp_path):
        shown = {name for name in row if not name.startswith("limit/")}
        for name in shown - {"step", "about", "seconds", "busiest_thread"}:
            (value,) = [e.value for e in events.Scalars(name) if e.step == row["step"]]
            assert value == pytest.approx(row[name], rel=1e-5)


def test_waiting_for_the_device_and_other_ranks_is_part_of_the_step(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(monitor, "gather", lambda parts, *_: clock.advance(0.2) or [parts])
    step(make(tmp_path), 1)
    names = ("perf/step_ms", "perf/step_ms_median", "perf/logging_ms")
    assert [rows(tmp_path)[1][name] for name in names] == pytest.approx([200, 200, 0])


def test_time_adds_up_over_restarts_and_lost_steps_count_as_lost(tmp_path, monkeypatch, clock):
    def process(start_step, steps, same_process=False):
        if not same_process:
            clock.start_process(monkeypatch)
        clock.advance(1.0)  # also to load a checkpoint
        m = make(tmp_path, start_step=start_step, max_steps=99, log_interval=2)
        for n in range(start_step + 1, start_step + steps + 1):
            spend(m, clock, forward=50, logging=10)
            step(m, n)
        m.close()
        return {name: pytest.approx(s, abs=1e-6)
                for name, s in report(tmp_path)["seconds"].items() if s > 1e-9}

    # steps 1 to 5; the first one is start-up, the last one has no log
    assert process(0, 5) == {"start-up": 1.06, "forward": 0.2, "logging": 0.04}
    # a checkpoint holds the first two: 3 to 5 are lost, in every phase
    assert process(2, 2) == {"start-up": 2.12, "forward": 0.1, "logging": 0.02, "lost": 0.18}
    assert [row["step"] for row in rows(tmp_path) if "perf/step_ms" in row] == [1, 2, 3, 4]
    # a second monitor in one process, as after a rollback: no time is counted twice
    assert process(4, 2, same_process=True) == {
        "start-up": 3.18, "forward": 0.15, "logging": 0.03, "lost": 0.18}
    # a process that has made no checkpoint: its start is lost, too
    assert process(4, 2) == {
        "start-up": 3.18, "forward": 0.15, "logging": 0.03, "lost": 0.18 + 1.06 + 0.06}
    process(6, 0)  # stopped before its first step
    # a run continued from an older checkpoint: what earlier processes lost stays lost
    assert process(1, 1) == {"start-up": 2.12, "lost": 1.3 + 2 * 1.06 + 3 * 0.06}
    assert process(-1, 1) == {"start-up": 1.06, "lost": 1.3 + 4 * 1.06 + 3 * 0.06}  # from 0 on


def test_a_run_whose_metrics_were_deleted_ends_as_any_other(tmp_path):
    m = make(tmp_path)
    step(m, 1)
    (tmp_path / "metrics.jsonl").unlink()
    assert m.close() == "" and m.parts[0].on_gc not in gc.callbacks


def test_a_row_has_numbers_and_what_else_a_fork_writes(tmp_path):
    """What cannot be drawn is not read."""
    numbers = [np.float32(1.5), np.array([1.5]), np.array(1.5, np.float16), torch.tensor(1.5),
               torch.tensor([[1.5]], dtype=torch.bfloat16, requires_grad=True)]
    odd = {"a/flag": True, "a/text": "yes", "note": "text", "a/list": [1, 2], "a/path": tmp_path,
           "sample": 5, "anomaly": None, "perf/data_ms": "slow", "goodput/lost": None}
    m = make(tmp_path, tensorboard=True)
    m.write(np.int64(1), dict(enumerate(numbers)) | {"a/nan": np.float32("nan")})
    m.write(1, {"anomaly": "gradient spike", "value": 2.0, "rank": 0})
    m.write(1, odd | {"train/loss": 2.0, "a/array": torch.ones(2), "end": {"b": "c", "d": np.nan}})
    m.write(2, {"train/loss": 3.0, "sample": 5})
    m.close()
    about, written, _, row = rows(tmp_path)[:4]
    assert about["about"]["last_step"] == 8
    assert row["a/array"] == [1, 1] and row["end"] == {"b": "c", "d": None}
    assert written == {"step": 1, "a/nan": None} | {str(i): 1.5 for i in range(5)}
    events = events_of(tmp_path / "tensorboard")
    drawn = [[e.value for e in events.Scalars(name)] for name in (*"01234", "train/loss")]
    assert drawn == [*[[1.5]] * 5, [2, 3]] and not {"value", "rank"} & {*events.Tags()["scalars"]}
    kept = [row for _, row in read_rows(tmp_path / "metrics.jsonl")]
    assert kept[3:5] == [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 3.0}]
    assert report(tmp_path)["figures"]["train/loss"] == 3.0


def test_summary_says_where_the_time_went(tmp_path, clock):
    """Rows between logs, as of evaluations, do not change how it is divided."""
    m = make(tmp_path)
    for n in range(1, 9):
        spend(m, clock, **{"forward" if n <= 4 else "backward": 50 if n == 5 else 5})
        step(m, n)
        if n in (2, 7):
            m.write(n, {"val/loss": 1.0})
    spend(m, clock, checkpoint=100)
    text = m.close()
    share = dict(re.findall(r"^ +(\S+) +(\S+)%", text, re.MULTILINE))
    assert share == {"start-up": "2.7", "forward": "8.1", "backward": "35.1", "checkpoint": "54.1"}
    assert "steps   5 ms (median), first tenth 5 ms, last tenth 5 ms" in text
    assert "goodput 43.2% of the time was training, 0.0% was lost" in text
    assert "verdict too few logs" in text
    window = [row for row in rows(tmp_path) if "perf/step_ms" in row][-1]
    assert window["perf/step_ms_median"] == pytest.approx(5)
    assert window["perf/step_ms_p95"] == pytest.approx(50)


def test_off_is_loss_and_throughput_alone(tmp_path, clock):
    m = make(tmp_path, level="off")
    for n in range(1, 9):
        spend(m, clock, forward=20, evaluation=30)
        step(m, n)
    text = m.close()
    assert set(rows(tmp_path)[1]) == {
        "step", "train/loss", "train/learning_rate", "train/tokens", "perf/step_ms",
        "perf/tokens_per_second", "perf/tflops", "perf/startup_s"}
    for share in (r"^ +other +(\d+\.\d)%", r"^goodput (\d+\.\d)%"):
        assert re.search(share, text, re.MULTILINE)[1] == "35.0"  # 7 of 8 steps
    assert report(tmp_path)["wall_s"] == pytest.approx(0.4)


def test_metrics_are_means_over_the_interval(tmp_path, clock):
    """Padding is not counted as real tokens; a phase of another name counts as other."""
    m = make(tmp_path)
    for n in range(1, 9):
        spend(m, clock, forward=10, shuffle=5)
        m.log("fork/metric", 10 * n)
        m.log("fork/weighted", torch.tensor(4.0 * n), weight=n)
        step(m, n, float(n), real_tokens=250)
    names = "train/loss", "fork/metric", "fork/weighted", "train/tokens"
    found = {row["step"]: tuple(row[name] for name in names) for row in logs(tmp_path)}
    assert found == {1: (1, 10, 4, 250), 4: (3, 30, 4, 1000), 8: (6.5, 65, 4, 2000)}
    row = logs(tmp_path)[-1]
    assert row["perf/real_tokens_per_second"] * 4 == pytest.approx(row["perf/tokens_per_second"])
    assert row["perf/padding_fraction"] == 0.75
    assert row["perf/other_ms"] == pytest.approx(5) and row["perf/step_ms"] == pytest.approx(15)
    m.close()
    found = report(tmp_path)  # seven steps: the first counts as start-up
    assert found["seconds"]["shuffle"] == pytest.approx(0.035, abs=0.006)
    assert found["seconds"]["other"] == 0 and found["wall_s"] == pytest.approx(0.12, abs=0.02)
    assert "        shuffle " in report_text(found)


def test_what_other_loops_pass(tmp_path):
    """A loss that is added to, steps that meet no interval; what lies in the folder is kept."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    m, total = Monitor(tmp_path, log_interval=10), torch.zeros((), requires_grad=True)
    for step in range(3, 28, 4):
        total.data += 1
        m.log("step", 5)
        for name in ("waiting", "rollout"):
            m.phase(name)
        m.step(step, loss=total, lr=[0.5], tokens=(None, float("nan"), 2)[step % 3])
    m.clock.seconds["forward"] += 100
    m.close()
    m.close()
    assert m.healthy and column(tmp_path, "train/loss") == {3: 1, 15: 3, 27: 6}
    for name in ("perf/waiting_ms", "phase/rollout_ms"):
        assert [step for step, x in column(tmp_path, name).items() if x > 0] == [3, 15, 27]
    assert set(column(tmp_path, "train/learning_rate").values()) == {0.5}
    assert sum(row["seconds"]["forward"] for row in rows(tmp_path) if "seconds" in row) < 150
    assert next(tmp_path.glob("metrics.jsonl.*")).read_text() == '{"step": 1}\n'
    for first in (31, 32):  # a resume goes on counting
        m = Monitor(tmp_path, log_interval=1)
        m.step(first, tokens=5)
        m.close()
    tokens = column(tmp_path, "train/tokens")
    assert tokens[32] == tokens[31] + 5
    m = Monitor(tmp_path / "never", log_interval=-1)
    m.write(0, {"val/loss": 4.0})  # as of an evaluation before the first step
    m.step(1, loss=total)
    for n in (1, 2):
        m.write(n, {"note": "x" * telemetry.TAIL_BYTES})
    m.close()
    Monitor(tmp_path / "never", first_step=3).close()
    assert not m.losses and not column(tmp_path / "never", "train/loss")
    assert column(tmp_path / "never", "val/loss") == {0: 4.0}
    assert not [*tmp_path.glob("never/metrics.jsonl.*")]  # it is not another program's
    Monitor(tmp_path / "metrics.jsonl/x", tracker=("wandb", {}), first_step=1).close()
    for n in (1, 1, 2):  # a step evaluated again after a kill, at last with other data
        m = Monitor(tmp_path / "again", first_step=1)
        for row in ({"evaluated": {"n": n}}, {"val/loss": n}):
            m.write(0, row)
        m.close()
    assert [row["val/loss"] for row in rows(tmp_path / "again") if "val/loss" in row] == [1, 2]


def test_odd_values_names_and_screens_do_not_stop_training(tmp_path, monkeypatch):
    """Nor does another thread that logs a new metric during a log."""
    class Tee:  # without flush
        def write(self, text):
            pass

    def on_host(parts, device):
        m.log(f"meanwhile/{len(names)}", 1)
        names.append(1)
        return plain(parts, device)

    m, names, plain = Monitor(tmp_path, log_interval=1, tensorboard=False), [], monitor.on_host
    monkeypatch.setattr(monitor, "on_host", on_host)
    monkeypatch.setattr(sys, "stdout", Tee())
    odd = [None, "text", 10**400, {}, [torch.ones((), requires_grad=True)] * 2,
           torch.eye(2).to_sparse()]
    for number, value in enumerate(odd, 1):
        m.log_all({0: 0.5, "odd": value})
        m.step(number, loss=value, tokens=value)
    monkeypatch.undo()
    m.close()
    assert m.healthy and column(tmp_path, "0") == dict.fromkeys(range(1, 7), 0.5)
    assert column(tmp_path, "meanwhile/0") == {2: 1}


def test_opening_tensorboard_is_part_of_the_start(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(monitor.TensorBoard, "open", lambda self: clock.advance(0.7))
    monkeypatch.setattr(monitor.TensorBoard, "write", lambda *_: None)
    m = make(tmp_path, tensorboard=True)
    for n in range(1, 9):
        spend(m, clock, forward=20)
        step(m, n)
    assert column(tmp_path, "perf/startup_s") == {1: pytest.approx(0.72)}
    assert column(tmp_path, "perf/logging_ms")[4] == 0


def test_no_rank_is_the_slowest_before_the_times_of_all_are_known():
    """With a log at each step a GPU is seldom there when the host asks; one rank's may be."""
    own = np.zeros((3, len(OWN_PHASES)))
    own[2, 1] = 20.0
    assert slowest_rank(own) == {}
    own[:, 1] = 10.0, 10.0, 20.0
    assert slowest_rank(own)["perf/slowest_rank_ratio"] == 2


@pytest.mark.parametrize("noise, spike, found", [
    (0.01, 1.5, True), (0.5, 9.0, True), (0.5, 2.0, False), (0.001, 1.15, False)])
def test_a_spike_is_far_above_the_noise(noise, spike, found):
    detector = Spikes()
    losses = 1.0 + noise * np.sin(np.arange(80.0))
    losses[70] = spike
    for n in range(8, 81, 8):  # every second step has a loss
        at, values = range(2 * n - 14, 2 * n + 1, 2), losses[n - 8 : n, None].tolist()
        steps = [(row["anomaly"], row["step"]) for row in detector.add(at, values, [1.0] * 8)[0]]
        assert steps == [("loss spike", 142)] * (found and n == 72)


def test_a_device_is_known_by_its_exact_name_or_not_at_all(monkeypatch):
    cuda = torch.device("cuda", 0)
    for name, dtype, expected in [("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
                                  ("NVIDIA H100 80GB HBM3", torch.float32, 67e12),
                                  ("NVIDIA RTX A1000", torch.bfloat16, None),
                                  ("NVIDIA L40", torch.bfloat16, None)]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert device.peak_flops(cuda, dtype) == expected
    assert device.peak_flops(CPU, torch.float32) is None


def test_tensorboard_goes_on_after_a_restart_whatever_the_clock_says(tmp_path, monkeypatch):
    """Four processes, the third in the same second as the second, the last an hour before."""
    real = time.time
    for start, later in ((0, 0), (4, 1), (8, 1), (12, -3600)):
        monkeypatch.setattr(time, "time", lambda later=later: real() // 60 * 60 + later)
        m = make(tmp_path, tensorboard=True, start_step=start, log_interval=1)
        for n in range(start + 1, start + 7):  # two more than the next one goes on from
            step(m, n, float(n))
        m.close()
        monkeypatch.undo()
    events = events_of(tmp_path / "tensorboard")
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 19))


def fail(*_, **__):
    raise ZeroDivisionError("of the diagnosis")


@pytest.mark.parametrize("part", ["news", "log_line", "read_resources", "report", "limits"])
def test_an_error_in_the_diagnosis_ends_only_that(run, tmp_path, monkeypatch, part):
    monkeypatch.setattr(gc, "callbacks", [])
    monkeypatch.setattr(machine if part in ("read_resources", "limits") else monitor, part, fail)
    monkeypatch.setattr(machine, "SECONDS_BETWEEN", 0.0)
    told = run("--out_dir", "r", "--log_interval", 2)
    assert told.count("warning: the monitor is off after an internal error") == 1
    assert "ZeroDivisionError: of the diagnosis (test_monitor.py:" in told
    assert (tmp_path / "r/checkpoints/step_00000012.pt").exists() and not gc.callbacks


def test_an_error_in_the_diagnosis_does_not_hide_the_error_of_training(run, monkeypatch):
    monkeypatch.setattr(monitor, "report", fail)
    monkeypatch.setattr(machine.Machine, "close", fail)
    monkeypatch.setattr(train, "update", raising(RuntimeError("the real one")))
    assert "failed: RuntimeError: the real one" in run("--out_dir", "r", expect=1)


class FakeEvent:
    """Of a device that is always 5 ms behind."""

    clock = None

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock.now + 0.005

    def query(self):
        return self.clock.now >= self.at

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def device_clock(clock, monkeypatch):
    monkeypatch.setattr(FakeEvent, "clock", clock)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return clock


def test_device_times_are_read_when_the_device_has_got_there(device_clock):
    times = DeviceTimes()
    for n in range(100):
        times.begin("other")
        for name in ("data", "forward", "backward", "forward", "backward", "optimizer", "other"):
            times.mark(name)
            device_clock.advance(0.002 if name == "forward" else 0.0)
        if n % 10 == 5:
            times.mark("evaluation")  # a step with something else in it is no sample
        times.end()
        if n % 5 == 4:
            early = times.means()
            assert len(times.done) == 2  # the newest are not waited for: 8 ms, of which 5
    assert early["forward"] == pytest.approx(4)
    device_clock.advance(0.01)
    means = times.means()
    assert means["forward"] == pytest.approx(4) and means["backward"] == pytest.approx(0)
    assert not times.done
    assert times.take() == pytest.approx([4] * 90) and times.take() == []


def test_the_row_of_a_gpu_run_has_the_gpu_s_times(tmp_path, device_clock):
    """And those of the host before its first step is there."""
    m = make(tmp_path)
    m.clock.events = DeviceTimes()
    for n in range(1, 9):
        spend(m, device_clock, data=1, forward=10, backward=20)
        device_clock.advance(0.01)
        step(m, n)
        row = rows(tmp_path)[-1]
        assert row["perf/forward_ms"] == pytest.approx(10)
        assert row["perf/data_ms"] == pytest.approx(1)
        assert row["perf/step_ms"] == pytest.approx(41)
    assert row["perf/step_ms_median"] == pytest.approx(41)


def test_on_a_gpu_heavy_steps_and_own_phases_count_as_they_are(tmp_path, device_clock, monkeypatch):
    """Every second step takes longer; in its own phase the host waits for the work queued."""
    m, queued_until = make(tmp_path, log_interval=48), [0.0]
    m.clock.events = DeviceTimes()
    monkeypatch.setattr(FakeEvent, "record", lambda event: setattr(event, "at", queued_until[0]))
    for n in range(1, 961):
        m.phase("rollout")
        device_clock.now = queued_until[0] = queued_until[0] + 0.005
        m.phase("forward")
        queued_until[0] += 0.03 if n % 2 else 0.01
        step(m, n)
    names = "perf/step_ms", "perf/other_ms", "phase/rollout_ms"
    found = [np.mean([*column(tmp_path, name).values()][2:]) for name in names]
    assert found == [pytest.approx(25, rel=0.05), pytest.approx(5), pytest.approx(5)]


def test_nothing_grows_over_many_steps(tmp_path, monkeypatch):
    """A million are in `python -m tests.bench monitor_cost`; here what is kept is counted."""

    def size(m):
        lists = m.spikes.recent, m.gathered, m.losses, m.clock.window_ms
        return len(pickle.dumps((vars(m.history), lists)))

    # With a constant time between readings: noise would make slow-downs to keep, up to a bound.
    Clock(monkeypatch, tick=1e-4)
    m = make(tmp_path, max_steps=10**6, log_interval=2)
    sizes = []
    for n in range(1, 4501):
        m.phase("forward")
        m.log("x", 1.0)
        step(m, n)
        if n in (3000, 4500):
            sizes.append(size(m))
    m.close()
    assert sizes[1] < 1.2 * sizes[0]
