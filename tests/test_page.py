"""The page of a run: what it holds, that its text stays text, and what a browser makes of it."""

import hashlib
import json
import math
import re
import shutil
import subprocess
import tracemalloc

import conftest
import numpy as np
import pytest
from test_slower import row_of

from steady.watch import history as telemetry
from steady.watch.report import report
from tools import report as page
from tools.report import main

EVIL = ("</script><script>document.title = 'owned'</script>"
        "<img src=x onerror=\"document.title='owned'\">")


def make_page(tmp_path, *runs) -> dict:
    assert main([*map(str, runs), "--html", str(tmp_path / "page.html")]) == 0
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>',
                         (tmp_path / "page.html").read_text(), re.DOTALL)
    return json.loads(text)


def test_a_page_has_what_a_run_did(run, tmp_path):
    printed = run("--out_dir", "r", "--sample_interval", 6, "--eval_interval", 6,
                  "--backup_to", f"memory://me:secret@host/{tmp_path.name}")
    (told,) = make_page(tmp_path, "r")["runs"]
    assert "secret" not in (tmp_path / "page.html").read_text()
    assert (told["name"], told["step"], told["config"]["max_steps"]) == ("r", 12, "12")
    steps, losses = told["lines"]["train/loss"]
    row = next(row for row in conftest.rows(tmp_path / "r") if "train/loss" in row)
    assert steps == [1, 4, 8, 12] and losses[0] == pytest.approx(row["train/loss"], rel=1e-3)
    assert told["lines"]["val/loss"][0] == [6, 12]
    steps, times = told["lines"]["perf/forward_ms"]
    assert steps == [4, 8, 12] and all(times)  # the first step starts the process
    assert [sample["step"] for sample in told["samples"]] == [6, 12]
    assert told["samples"][0]["text"] in printed and told["samples"][1]["text"] in printed
    assert told["verdict"] == report(tmp_path / "r")["verdict"]
    assert told["config"]["seq_len"] == "32"
    assert told["seconds"]["start-up"] > 0 and told["seconds"]["lost"] == 0


def test_what_a_crash_cost_and_what_differs_between_two_runs(run, tmp_path):
    flags = "--out_dir", "a/r", "--save_interval", 4, "--log_interval", 1
    run(*flags)
    (tmp_path / "a/r/checkpoints/step_00000012.pt").unlink()
    (tmp_path / "a/r/checkpoints/best.pt").unlink(missing_ok=True)
    run(*flags, "--auto_resume")
    run("--out_dir", "b/r", "--max_steps", 4, "--seed", 7)
    one, other = make_page(tmp_path, "a/r", "b/r")["runs"]
    assert (one["name"], other["name"]) == ("a/r", "b/r")
    assert one["config"]["seed"] != other["config"]["seed"] == "7"
    assert one["config"]["d_model"] == other["config"]["d_model"]
    assert one["seconds"]["lost"] > 0 and other["seconds"]["lost"] == 0
    assert [event["step"] for event in one["events"] if event["kind"] == "restart"] == [8]


def write_rows(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def long_run(logs: int, slow_from: int, every=50):
    """Rows of a run of logs * every steps, in which data takes longer from the log slow_from on."""
    rng = np.random.default_rng(0)
    for k in range(1, logs + 1):
        ms = dict(zip(telemetry.STEP_PHASES, (2, 20, 20, 5, 15, 3), strict=True))
        ms |= dict(zip(telemetry.OUTSIDE_PHASES, (1, 2, 1), strict=True))
        ms = {name: value * rng.uniform(0.98, 1.02) for name, value in ms.items()}
        ms["data"] += 20 * (k >= slow_from)
        row = row_of(every * k, **ms)
        yield {**row, "train/loss": 5 * k**-0.1 + rng.normal(0, 0.02), "perf/mfu": 0.4,
               "train/grad_norm": rng.uniform(0.9, 1.1), "train/learning_rate": 1e-3,
               "perf/tokens_per_second": 1e6 / row["perf/step_ms"],
               "memory/host_rss_gb": 1.0, "memory/peak_gb": 60.0, "ranks_ms": [40.0] * 7 + [60.0],
               "perf/slowest_rank": 7, "perf/slowest_rank_ratio": 1.5, "perf/slowest_rank_phase": 0,
               **{f"health/update_ratio/blocks.{i}": 1e-3 * (i + 1) for i in range(32)}}
        if k == logs // 3:
            yield {"step": every * k - 7, "anomaly": "loss spike", "value": 9.0, "median": 2.0,
                   "steps": 1, "rank": 3}


def test_a_long_run_is_thinned_and_loses_no_event(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "POINTS", 100)
    write_rows(tmp_path / "r", long_run(180, slow_from=121))
    (tmp_path / "r/config.yaml").write_text("a: [")  # it cannot be read
    (told,) = make_page(tmp_path, tmp_path / "r")["runs"]
    assert told["config"] == {}
    losses = [row["train/loss"] for row in long_run(180, 121) if "train/loss" in row]
    steps, means = told["lines"]["train/loss"]
    assert len(steps) == page.POINTS and steps[-1] == 180 * 50
    assert means[:2] == pytest.approx([np.mean(losses[:2]), np.mean(losses[2:4])], rel=1e-3)
    kinds = {event["kind"]: event for event in told["events"]}
    assert kinds["anomaly"]["step"] == 2_993 and "9" in kinds["anomaly"]["text"]
    assert abs(kinds["slow-down"]["step"] - 6_001) <= 100
    assert kinds["slow-down"]["text"].count("data +") == 1


@pytest.mark.slow
def test_rows_are_not_kept(tmp_path):
    """Neither by the report nor by the page, which keeps the numbers that it draws."""
    peaks = []
    for logs in (1500, 3000):  # the newest 512 are kept, and a thinned history
        write_rows(tmp_path / "r", long_run(logs, slow_from=201))
        tracemalloc.start()
        page.run_data(report(tmp_path / "r"), page.POINTS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.25 * (tmp_path / "r/metrics.jsonl").stat().st_size / 2


def write_evil_run(folder):
    row = {"step": 1, "sample": EVIL, f"train/loss/{EVIL}": 1.0, "perf/step_ms": 3.0,
           "train/loss": None, "perf/mfu": 10**400, "ranks_ms": [EVIL, None, {}], "own/flag": True,
           "train/grad_norm": "x", "perf/data_fraction": None, "perf/tokens_per_second": math.nan,
           "perf/forward_ms": 1e308, "perf/slowest_rank": -1, "goodput/wall_s": 1}
    write_rows(folder, [
        row, row | {"step": 2, "perf/mfu": 0.5}, {"step": 2, "hang": EVIL},
        {"step": 2, "runs_out": EVIL}, row | {"step": 10**400},
        {"step": 2, "anomaly": EVIL, "rank": EVIL, "value": 1, "median": 1,
         "first_bad_layer": EVIL}, {"step": 2, "anomaly": EVIL, "value": EVIL},
        {"step": 2, "val/loss": None}])
    (folder / "config.yaml").write_text(f"# commit: {EVIL}\n{json.dumps({EVIL: EVIL})}\n")


def test_no_text_of_a_run_becomes_markup(tmp_path, capsys):
    folder = tmp_path / EVIL.replace("/", "")
    write_evil_run(folder)
    (told,) = make_page(tmp_path, folder)["runs"]
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == text.count("</script>") == 2 and "<img" not in text
    assert told["step"] == 2 and told["samples"][0]["text"] == EVIL
    capsys.readouterr()
    assert main([str(folder), "--json"]) == 0 and "NaN" not in capsys.readouterr().out
    assert told["config"] == {EVIL: EVIL}
    assert told["lines"].keys() == {"train/loss", f"train/loss/{EVIL}", "perf/step_ms", "val/loss"}


def test_text_that_is_no_unicode_is_escaped(tmp_path, capsys):
    write_rows(tmp_path / "r", [{"step": 1, "hang": "\udcff"}])
    make_page(tmp_path, tmp_path / "r")
    make_page(tmp_path, tmp_path / "r")  # an older page may be there
    assert "no progress: \\udcff" in capsys.readouterr().out


def test_the_library_is_the_one_whose_checksum_is_noted(tmp_path):
    library = (page.PARTS / "uPlot.iife.min.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() in (page.PARTS / "uPlot.LICENSE").read_text()
    write_rows(tmp_path / "r", [])
    make_page(tmp_path, tmp_path / "r")
    assert (page.PARTS / "uPlot.LICENSE").read_text() in (tmp_path / "page.html").read_text()


def show(file) -> str:
    """The page as chromium leaves it, from disk; its console has no error."""
    chromium = shutil.which("chromium") or pytest.skip("needs chromium")
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--window-size=1300,1600", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_browser_draws_one_run_and_two(tmp_path):
    write_rows(tmp_path / "r", long_run(180, slow_from=121))
    padded = {"perf/padding_fraction": 0.5, "profile": {"forward": {"model.py:1": 9}}}
    write_rows(tmp_path / "s", (row | padded for row in long_run(90, slow_from=999)))
    make_page(tmp_path, tmp_path / "r")
    one = show(tmp_path / "page.html")
    assert one.count("<canvas") == one.count("<figure") == 6 and "<summary" not in one
    assert "9000 ·" in one and "data +20" in one[one.index("<header") : one.index("</header>")]
    make_page(tmp_path, tmp_path / "r", tmp_path / "s")
    two = show(tmp_path / "page.html")
    assert two.count("<canvas") == 7 and f"train {tmp_path}/s" in two and "start: slow" not in two


@pytest.mark.slow
def test_a_browser_runs_no_text_of_a_run(tmp_path):
    folder = tmp_path / EVIL.replace("/", "")
    write_evil_run(folder)
    make_page(tmp_path, folder, folder)
    shown = show(tmp_path / "page.html")
    assert "<title>owned" not in shown and "<img" not in shown and "<pre>&lt;/script" in shown
    assert shown.count("<script") == 2
