"""What the monitor reports is what happened."""

import json
import time

import pytest
import torch

import monitor
from monitor import STEP_PHASES, Monitor, duration, open_metrics, si

CPU = torch.device("cpu")


def make(out_dir, **changes):
    settings = dict(
        mode="light", log_interval=4, start_step=0, max_steps=8, tokens_per_step=1000,
        flops_per_token=10**6, peak=None, device=CPU, reduce=lambda values: values,
        out_dir=out_dir, tensorboard_dir=None, flush_secs=120,
    )  # fmt: skip
    return Monitor(**{**settings, **changes})


def rows(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def test_phases_are_the_time_that_passed_in_them(tmp_path, capsys):
    m = make(tmp_path, peak=1e9)
    sleeps = dict(data=0.01, forward=0.02, backward=0.03, optimizer=0.005)
    slept = dict.fromkeys(sleeps, 0.0)  # in the last interval; a sleep can be longer than asked
    for step in range(1, 9):
        for name, seconds in sleeps.items():
            m.phase(name)
            began = time.perf_counter()
            time.sleep(seconds)
            slept[name] += (time.perf_counter() - began) * (step > 4)
        previous = m.phase("evaluation")
        time.sleep(0.05)
        m.phase("other")
        assert previous == "optimizer"
        m.step(step, learning_rate=0.1)
    row = rows(tmp_path)[-1]
    for name, seconds in slept.items():
        assert row[f"perf/{name}_ms"] == pytest.approx(seconds / 4 * 1e3, rel=0.1)
    parts = [row[f"perf/{name}_ms"] for name in STEP_PHASES]
    assert row["perf/step_ms"] == pytest.approx(sum(parts))  # evaluation is not part of a step
    assert row["perf/tokens_per_second"] == pytest.approx(1e6 / row["perf/step_ms"])
    assert row["perf/tflops"] == pytest.approx(row["perf/tokens_per_second"] * 1e6 / 1e12)
    assert row["perf/mfu"] == pytest.approx(row["perf/tflops"] * 1e12 / 1e9)
    assert row["perf/data_fraction"] == pytest.approx(row["perf/data_ms"] / row["perf/step_ms"])
    assert "mfu" in capsys.readouterr().out


def test_metrics_are_means_over_the_interval(tmp_path):
    m = make(tmp_path)
    for step in range(1, 9):
        m.log("train/loss", torch.tensor(float(step)))
        m.log("fork/metric", 10 * step)
        m.step(step, 0.1)
    found = {row["step"]: (row["train/loss"], row["fork/metric"]) for row in rows(tmp_path)}
    assert found == {1: (1, 10), 4: (3, 30), 8: (6.5, 65)}
    assert [row["train/tokens"] for row in rows(tmp_path)] == [1000, 4000, 8000]


def test_ranks_are_averaged_in_one_exchange(tmp_path):
    sent = []
    m = make(tmp_path, reduce=lambda values: sent.append(values) or values * 2)
    m.log("b", 1.0)
    m.log("a", torch.tensor(3.0))
    m.step(1, 0.1)
    assert len(sent) == 1 and sent[0].tolist() == [3.0, 1.0]  # by name, so all ranks agree
    assert (rows(tmp_path)[0]["a"], rows(tmp_path)[0]["b"]) == (6, 2)


def test_waiting_for_the_device_and_other_ranks_is_part_of_the_step(tmp_path):
    m = make(tmp_path, reduce=lambda values: time.sleep(0.2) or values)
    m.log("train/loss", 1.0)
    m.step(1, 0.1)
    row = rows(tmp_path)[0]
    assert row["perf/step_ms"] > 200 and row["perf/logging_ms"] < 100


def test_off_is_loss_and_throughput_alone(tmp_path):
    m = make(tmp_path, mode="off")
    m.log("train/loss", 1.0)
    m.step(1, 0.1)
    assert set(rows(tmp_path)[0]) == {
        "step", "train/loss", "train/learning_rate", "train/tokens", "perf/step_ms",
        "perf/tokens_per_second", "perf/tflops",
    }  # fmt: skip


def test_ranks_other_than_0_write_nothing(tmp_path, capsys):
    m = make(None)
    m.log("train/loss", 1.0)
    m.step(1, 0.1)
    m.close()
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_a_continued_file_has_no_step_twice_and_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 5}\n{"step": 9}\n{"step": 10, "tra')
    file, before = open_metrics(path, start_step=5)
    with file:
        file.write('{"step": 6}\n')
    assert [row["step"] for row in rows(tmp_path)] == [1, 5, 6] and before == {}


def test_goodput_goes_on_over_restarts_and_counts_what_was_lost(tmp_path):
    def process(start_step, steps, seconds):
        m = make(tmp_path, start_step=start_step, max_steps=99, log_interval=1)
        m.startup_seconds = 1.0
        for step in range(start_step + 1, start_step + steps + 1):
            m.phase("forward")
            time.sleep(seconds)
            m.phase("other")
            m.step(step, 0.1)
        m.close()
        return m.goodput()

    first = process(0, 4, 0.05)  # steps 1 to 4, of which a checkpoint holds the first two
    second = process(2, 2, 0.05)  # steps 3 and 4 again
    assert first["goodput/lost"] == 0 and first["goodput/wall_s"] == pytest.approx(1.2, abs=0.1)
    wall = second["goodput/wall_s"]
    assert wall == pytest.approx(2.3, abs=0.15)
    assert second["goodput/startup"] * wall == pytest.approx(2.0, abs=0.01)
    assert second["goodput/training"] * wall == pytest.approx(0.2, abs=0.05)
    assert second["goodput/lost"] * wall == pytest.approx(0.1, abs=0.05)
    shares = [share for name, share in second.items() if name != "goodput/wall_s"]
    assert sum(shares) == pytest.approx(1)


def test_summary_says_where_the_time_went(tmp_path):
    m = make(tmp_path)
    m.startup_seconds = 0.0
    for step in range(1, 9):
        m.phase("forward")
        time.sleep(0.05 if step == 5 else 0.005)
        m.phase("other")
        m.step(step, 0.1)
        if step == 8:
            m.phase("checkpoint")
            time.sleep(0.1)
            m.phase("other")
    lines = m.summary().splitlines()
    share = {line.split()[0]: float(line.split()[1].rstrip("%")) for line in lines if "█" in line}
    assert share["checkpoint"] == pytest.approx(100 * 0.1 / 0.185, abs=8)
    assert share["forward"] == pytest.approx(100 * 0.085 / 0.185, abs=8)
    assert "slowest step 5 (5" in m.summary()
    window = rows(tmp_path)[-1]
    assert 4 < window["perf/step_ms_median"] < 12 < window["perf/step_ms_p95"] < 52


def test_a_sink_that_fails_is_given_up_with_one_warning(tmp_path, capsys):
    m = make(tmp_path, tensorboard_dir=tmp_path / "tb", log_interval=1)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def add_scalar(self, *args):
            raise OSError(28, "No space left on device")

    m.metrics_file = m.tensorboard = Full()
    for step in range(1, 5):
        m.log("train/loss", 1.0)
        m.step(step, 0.1)
    m.close()
    told = capsys.readouterr()
    assert told.err.count("no more metrics.jsonl") == told.err.count("no more TensorBoard") == 1
    assert "No space left" in told.err and told.out.count("loss 1.0000") == 4


def test_not_a_number_is_still_json(tmp_path):
    m = make(tmp_path)
    m.log("train/loss", torch.tensor(float("nan")))
    m.step(1, 0.1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text)["train/loss"] is None


def test_tensorboard_has_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    m = make(tmp_path, tensorboard_dir=tmp_path / "tb")
    for step in range(1, 9):
        m.log("train/loss", float(step))
        m.step(step, 0.1)
    m.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    for row in rows(tmp_path):
        for name in row.keys() - {"step"}:
            (value,) = [e.value for e in events.Scalars(name) if e.step == row["step"]]
            assert value == pytest.approx(row[name], rel=1e-5)


def test_tensorboard_goes_on_after_a_restart_whatever_the_clock_says(tmp_path, monkeypatch):
    """Three processes, the second in the same second as the first, the third an hour before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock = time.time
    for start, hours in ((0, 0), (4, 0), (8, -1)):
        monkeypatch.setattr(time, "time", lambda hours=hours: clock() // 60 * 60 + 3600 * hours)
        m = make(tmp_path, tensorboard_dir=tmp_path / "tb", start_step=start, log_interval=1)
        for step in range(start + 1, start + 7):  # two more than the next one goes on from
            m.log("train/loss", float(step))
            m.step(step, 0.1)
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
