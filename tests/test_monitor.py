"""What the monitor reports is what happened."""

import dataclasses
import json
import re
import time

import pytest
import torch

import monitor
from config import Config
from monitor import (
    PHASES,
    STEP_PHASES,
    DeviceTimes,
    Monitor,
    duration,
    open_metrics,
    report,
    si,
)

CPU = torch.device("cpu")


def make(out_dir, **changes):
    names = {f.name for f in dataclasses.fields(Config)} & changes.keys() - {"tensorboard_dir"}
    options = {name: changes.pop(name) for name in names}
    cfg = Config(**dict(log_interval=4, max_steps=8, batch_size=10, seq_len=100) | options)
    settings = dict(start_step=0, flops_per_token=10**6, peak=None, device=CPU, out_dir=out_dir)
    return Monitor(cfg, **settings | changes)


def step(m, step, loss=1.0, grad_norm=1.0):
    m.step(step, 0.1, torch.tensor(loss), torch.tensor(grad_norm), tokens=1000)


def rows(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def test_phases_are_the_time_that_passed_in_them(tmp_path, capsys):
    m = make(tmp_path, peak=1e9)
    sleeps = dict(data=0.01, forward=0.02, backward=0.03, optimizer=0.005)
    slept = dict.fromkeys(sleeps, 0.0)  # in the last interval; a sleep can be longer than asked
    for n in range(1, 9):
        for name, seconds in sleeps.items():
            m.phase(name)
            began = time.perf_counter()
            time.sleep(seconds)
            slept[name] += (time.perf_counter() - began) * (n > 4)
        previous = m.phase("evaluation")
        time.sleep(0.05)
        m.phase("other")
        assert previous == "optimizer"
        step(m, n)
    row = rows(tmp_path)[-1]
    for name, seconds in slept.items():
        assert row[f"perf/{name}_ms"] == pytest.approx(seconds / 4 * 1e3, rel=0.1)
    parts = [row[f"perf/{name}_ms"] for name in STEP_PHASES if name != "waiting"]
    assert row["perf/step_ms"] == pytest.approx(sum(parts))  # evaluation is not part of a step
    assert row["perf/tokens_per_second"] == pytest.approx(1e6 / row["perf/step_ms"])
    assert row["perf/tflops"] == pytest.approx(row["perf/tokens_per_second"] * 1e6 / 1e12)
    assert row["perf/mfu"] == pytest.approx(row["perf/tflops"] * 1e12 / 1e9)
    assert row["perf/data_fraction"] == pytest.approx(row["perf/data_ms"] / row["perf/step_ms"])
    assert "mfu" in capsys.readouterr().out


def test_metrics_are_means_over_the_interval(tmp_path):
    m = make(tmp_path)
    for n in range(1, 9):
        m.log("fork/metric", 10 * n)
        step(m, n, float(n))
    found = {row["step"]: (row["train/loss"], row["fork/metric"]) for row in rows(tmp_path)}
    assert found == {1: (1, 10), 4: (3, 30), 8: (6.5, 65)}
    assert [row["train/tokens"] for row in rows(tmp_path)] == [1000, 4000, 8000]


def test_ranks_are_averaged_in_one_exchange(tmp_path):
    sent = []

    def gather(values):  # a second rank has twice of everything
        sent.append(values)
        return torch.stack((values, 2 * values * (values != 1) + (values == 1)))

    m = make(tmp_path, gather=gather)
    m.log("b", 2.0)
    m.log("a", torch.tensor(3.0))
    step(m, 1, 5.0, 7.0)
    # by name, so all ranks agree; what each is divided by; loss and gradient norm
    assert len(sent) == 1 and sent[0].tolist()[:6] == [3, 2, 1, 1, 5, 7]
    row = rows(tmp_path)[0]
    assert (row["a"], row["b"], row["train/loss"]) == (4.5, 3.0, 7.5)
    assert row["perf/slowest_rank"] == 1 and row["perf/slowest_rank_ratio"] == pytest.approx(2)


def test_waiting_for_the_device_and_other_ranks_is_part_of_the_step(tmp_path):
    m = make(tmp_path, gather=lambda values: time.sleep(0.2) or values[None])
    step(m, 1)
    row = rows(tmp_path)[0]
    assert row["perf/step_ms"] > 200 and row["perf/logging_ms"] < 100


def test_off_is_loss_and_throughput_alone(tmp_path):
    m = make(tmp_path, monitor="off")
    m.step(1, 0.1, torch.tensor(1.0), tokens=1000)
    assert set(rows(tmp_path)[0]) == {
        "step", "train/loss", "train/learning_rate", "train/tokens", "perf/step_ms",
        "perf/tokens_per_second", "perf/tflops", "perf/startup_s",
    }  # fmt: skip


def test_ranks_other_than_0_write_nothing(tmp_path, capsys):
    m = make(None)
    step(m, 1)
    m.close()
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_a_continued_file_has_no_step_twice_and_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 5}\n{"step": 9}\n{"step": 10, "tra')
    file, (kept, dropped) = open_metrics(path, start_step=5)
    with file:
        file.write('{"step": 6}\n')
    assert [row["step"] for row in rows(tmp_path)] == [1, 5, 6]
    assert [row["step"] for row in kept + dropped] == [1, 5, 9]


def test_goodput_goes_on_over_restarts_and_counts_what_was_lost(tmp_path):
    def process(start_step, steps, seconds):
        m = make(tmp_path, start_step=start_step, max_steps=99, log_interval=1)
        m.startup_seconds = 1.0
        for n in range(start_step + 1, start_step + steps + 1):
            m.phase("forward")
            time.sleep(seconds)
            m.phase("other")
            step(m, n)
        m.close()
        return m.goodput()

    first = process(0, 4, 0.05)  # steps 1 to 4, of which a checkpoint holds the first two
    second = process(2, 2, 0.05)  # steps 3 and 4 again
    assert first["goodput/lost"] == 0 and first["goodput/wall_s"] == pytest.approx(1.2, abs=0.1)
    wall = second["goodput/wall_s"]
    assert wall == pytest.approx(2.3, abs=0.15)
    assert second["goodput/startup"] * wall == pytest.approx(2.1, abs=0.03)  # with two first steps
    assert second["goodput/training"] * wall == pytest.approx(0.1, abs=0.05)
    assert second["goodput/lost"] * wall == pytest.approx(0.1, abs=0.05)
    shares = [share for name, share in second.items() if name != "goodput/wall_s"]
    assert sum(shares) == pytest.approx(1)


def test_summary_says_where_the_time_went(tmp_path):
    m = make(tmp_path)
    m.startup_seconds = 0.0
    for n in range(1, 9):
        m.phase("forward")
        time.sleep(0.05 if n == 5 else 0.005)
        m.phase("other")
        step(m, n)
        if n == 8:
            m.phase("checkpoint")
            time.sleep(0.1)
            m.phase("other")
    told = m.close()
    lines = told.splitlines()
    share = {line.split()[0]: float(line.split()[1].rstrip("%")) for line in lines if "█" in line}
    assert share["checkpoint"] == pytest.approx(100 * 0.1 / 0.185, abs=8)
    assert share["forward"] == pytest.approx(100 * 0.085 / 0.185, abs=8)
    assert "slowest step 5 (5" in told
    window = rows(tmp_path)[-2]
    assert 4 < window["perf/step_ms_median"] < 25 < 45 < window["perf/step_ms_p95"]


def test_a_sink_that_fails_is_given_up_with_one_warning(tmp_path, capsys):
    m = make(tmp_path, tensorboard_dir=tmp_path / "tb", log_interval=1)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            raise OSError(28, "No space left on device")

    m.metrics_file = m.tensorboard = Full()
    for n in range(1, 5):
        step(m, n)
    m.close()
    told = capsys.readouterr()
    assert told.err.count("no more metrics.jsonl") == told.err.count("no more TensorBoard") == 1
    assert "No space left" in told.err and told.out.count("loss 1.0000") == 4


def test_not_a_number_is_still_json(tmp_path):
    m = make(tmp_path)
    step(m, 1, float("nan"))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["train/loss"] is None


def test_tensorboard_has_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    m = make(tmp_path, tensorboard_dir=tmp_path / "tb")
    for n in range(1, 9):
        step(m, n, float(n))
    m.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    for row in rows(tmp_path):
        for name in row.keys() - {"step", "end", "slowest"}:
            (value,) = [e.value for e in events.Scalars(name) if e.step == row["step"]]
            assert value == pytest.approx(row[name], rel=1e-5)


def test_tensorboard_goes_on_after_a_restart_whatever_the_clock_says(tmp_path, monkeypatch):
    """Three processes, the second in the same second as the first, the third an hour before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock = time.time
    for start, hours in ((0, 0), (4, 0), (8, -1)):
        monkeypatch.setattr(time, "time", lambda hours=hours: clock() // 60 * 60 + 3600 * hours)
        m = make(tmp_path, tensorboard_dir=tmp_path / "tb", start_step=start, log_interval=1)
        for n in range(start + 1, start + 7):  # two more than the next one goes on from
            step(m, n, float(n))
        m.close()
        monkeypatch.undo()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 15))


def test_a_device_is_known_by_its_exact_name_or_not_at_all(monkeypatch):
    cuda = torch.device("cuda", 0)
    for name, dtype, expected in [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67e12),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
        ("NVIDIA L40", torch.bfloat16, None),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert monitor.peak_flops(cuda, dtype) == expected
    assert monitor.peak_flops(CPU, torch.float32) is None


def test_numbers_for_people():
    assert [si(x) for x in (0.5, 12, 1234, 1234567, 1.5e9)] == [
        "0.5",
        "12",
        "1.23k",
        "1.23M",
        "1.5G",
    ]
    assert duration(59.6) == "1m00s" and duration(3700) == "1h01m" and duration(5) == "5s"


def test_tensorboard_has_a_layout_the_configuration_and_the_diagnosis(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    m = make(tmp_path, tensorboard_dir=tmp_path / "tb")
    for n in range(1, 9):
        m.phase("forward")
        step(m, n)
    m.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert {"configuration/text_summary", "diagnosis/text_summary"} <= set(tags)
    assert "custom_scalars__config__" in tags
    text = events.Tensors("diagnosis/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "verdict" in text and "goodput" in text
    row = rows(tmp_path)[-2]
    parts = [row[f"perf/{n}_ms"] for n in PHASES if n != "waiting"]
    whole = events.Scalars(f"stacked/{len(parts)}_checkpoint")[-1].value
    assert whole == pytest.approx(sum(parts), rel=1e-4)


@pytest.mark.parametrize("mode, named", [("off", "training"), ("light", "forward")])
def test_the_report_of_a_run_without_phases_knows_its_time_too(tmp_path, mode, named):
    m = make(tmp_path, monitor=mode)
    m.startup_seconds = 0.0
    for n in range(1, 9):
        m.phase("forward")
        time.sleep(0.02)
        step(m, n)
    told = m.close()
    for share in (rf"^ +{named} +(\d+\.\d)%", r"^goodput (\d+\.\d)%"):  # 7 steps of 8, or so
        assert float(re.search(share, told, re.MULTILINE)[1]) > 65, told
    seconds = report(tmp_path)["seconds"]
    assert sum(seconds.values()) == pytest.approx(0.16, abs=0.05)


class FakeEvent:
    """A device that is always 5 ms behind, and a count of how many events there are."""

    made = 0

    def __init__(self):
        FakeEvent.made += 1

    def record(self):
        self.at = time.perf_counter() + 0.005

    def query(self):
        return time.perf_counter() >= self.at

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_device_times_come_from_a_pool_and_are_read_when_they_are_done():
    FakeEvent.made = 0
    times = DeviceTimes(FakeEvent, size=128)
    for n in range(100):
        times.begin("other")
        for name in ("data", "forward", "backward", "forward", "backward", "optimizer", "other"):
            times.mark(name)
            time.sleep(0.002 if name == "forward" else 0.0)
        if n % 10 == 5:
            times.mark("evaluation")  # a step with something else in it is no sample
        times.end()
        if n % 5 == 4:
            early = times.means()
            assert len(times.done) in (0, 1, 2)  # the newest are not waited for
    time.sleep(0.01)
    means = times.means()
    assert means["forward"] == pytest.approx(4.2, rel=0.3)
    assert means["forward"] > 4 * means["backward"]
    assert early and FakeEvent.made <= 128 and not times.done
    assert len(times.take_steps()) == 90 and times.take_steps() == []
    assert len(times.free) == FakeEvent.made


def test_a_pool_that_is_in_use_lets_steps_go_by():
    times = DeviceTimes(FakeEvent, size=64)
    for _ in range(50):
        times.begin("data")
        times.mark("forward")
        times.end()
    assert len(times.done) == 64 // 3
    time.sleep(0.01)
    times.means()
    assert len(times.free) == 64


def test_padding_is_not_counted_as_real_tokens(tmp_path):
    m = make(tmp_path)
    for n in range(1, 5):
        m.step(n, 0.1, 1.0, 1.0, tokens=1000, real_tokens=250)
    row = rows(tmp_path)[-1]
    assert row["perf/real_tokens_per_second"] * 4 == pytest.approx(row["perf/tokens_per_second"])


def test_nothing_grows_over_many_steps(tmp_path, capsys, monkeypatch):
    """A million are in `python -m tests.bench million`; here what the monitor keeps is counted."""
    import itertools
    import pickle

    # Each look at the clock is 0.1 ms after the one before: on a busy machine the monitor would
    # have slow-downs to keep, up to a bound that takes long to reach.
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-4)

    def size(m):
        kept = {k: v for k, v in vars(m.watch).items()}
        kept["levels"] = {k: vars(v) for k, v in kept["levels"].items()}
        return len(pickle.dumps((kept, m.recent, m.gathered, m.losses, m.window_ms)))

    m = make(tmp_path, max_steps=10**6, log_interval=2)
    sizes = []
    for n in range(1, 9001):
        m.phase("forward")
        m.log("x", 1.0)
        step(m, n)
        if n in (6000, 9000):
            sizes.append(size(m))
    m.close()
    assert sizes[1] < 1.2 * sizes[0]
