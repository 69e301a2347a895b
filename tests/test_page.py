"""The page of a run: what it holds, that its text stays text, and what a browser makes of it."""

import hashlib
import json
import math
import re
import shutil
import socket
import struct
import threading
import time
import tracemalloc
import urllib.error
import urllib.parse
import urllib.request

import conftest
import numpy as np
import pytest

import train
from steady.watch import sinks as telemetry
from steady.watch.report import report
from tools import page
from tools.report import main

EVIL = ("</script><script>document.title = 'owned'</script>"
        "<img src=x onerror=\"document.title='owned'\">")


def data_of(file) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>',
                         file.read_text(), re.DOTALL)
    return json.loads(text)


def make_page(tmp_path, *runs) -> dict:
    assert main([*map(str, runs), "--html", str(tmp_path / "page.html")]) == 0
    return data_of(tmp_path / "page.html")


def test_a_page_has_what_a_run_did(run, tmp_path):
    printed = run("--out_dir", "r", "--sample_interval", 6, "--monitor", "full",
                  "--eval_interval", 6)
    (told,) = make_page(tmp_path, "r")["runs"]
    assert (told["name"], told["step"], told["max_steps"]) == ("r", 12, "12")
    assert told["logs"]["step"] == [1, 4, 8, 12] and told["evaluations"]["step"] == [6, 12]
    row = conftest.rows(tmp_path / "r")[1]
    assert told["logs"]["train/loss"][0] == pytest.approx(row["train/loss"], rel=1e-3)
    assert told["logs"]["perf/forward_ms"][0] is None  # the first step starts the process
    assert all(told["logs"]["perf/forward_ms"][1:])
    assert {"blocks.0", "blocks.1", "embedding"} <= told["heat"]["layers"].keys()
    assert [sample["step"] for sample in told["samples"]] == [6, 12]
    assert told["samples"][0]["text"] in printed and told["samples"][1]["text"] in printed
    assert told["verdict"] == report(tmp_path / "r")["verdict"]
    assert told["config"]["seq_len"] == "32" and told["notes"]["torch"]
    (process,) = told["processes"]
    assert process["startup"] > 0 and process["training"] > 0 and process["lost"] == 0


def test_what_a_crash_cost_and_what_differs_between_two_runs(run, tmp_path):
    flags = "--out_dir", "a/r", "--save_interval", 4, "--log_interval", 1, "--no_tensorboard"
    run(*flags)
    (tmp_path / "a/r/checkpoints/step_00000012.pt").unlink()
    (tmp_path / "a/r/checkpoints/best.pt").unlink(missing_ok=True)
    run(*flags, "--auto_resume")
    run("--out_dir", "b/r", "--max_steps", 4, "--seed", 7)
    one, other = make_page(tmp_path, "a/r", "b/r")["runs"]
    assert (one["name"], other["name"]) == ("a/r", "b/r")
    assert one["config"]["seed"] != other["config"]["seed"] == "7"
    assert one["config"]["d_model"] == other["config"]["d_model"]
    crashed, second = one["processes"]
    assert crashed["lost"] > 0 and second["lost"] == 0 and second["startup"] > 0
    wall = sum(report(tmp_path / "a/r")["seconds"].values())
    kinds = [p[k] for p in (crashed, second) for k in p if k != "step"]
    assert sum(kinds) == pytest.approx(wall, rel=0.01)
    (restart,) = [event for event in one["events"] if event["kind"] == "restart"]
    assert restart["step"] == 8 and "lost" in restart["text"]


@pytest.mark.parametrize("place", [".", "r #1", "else/where"])
def test_a_trace_is_a_link_that_opens_from_the_page(tmp_path, place):
    """Where the run was trained under another path, too; a trace that is gone is text."""
    (tmp_path / "r #1/traces").mkdir(parents=True)
    (tmp_path / "r #1/traces/step_5.json").write_text("{}")
    write_rows(tmp_path / "r #1", [{"step": 7, "trace": "elsewhere/traces/step_5.json"},
                                   {"step": 9, "trace": "elsewhere/traces/step_8.json"}])
    file = tmp_path / place / "page.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    assert main([str(tmp_path / "r #1"), "--html", str(file)]) == 0
    (told,) = data_of(file)["runs"]
    ((path, link),) = told["traces"].items()
    assert any(line.endswith(path) for line in told["verdict"])
    address = urllib.parse.urlparse(urllib.parse.urljoin(file.as_uri(), link))
    assert urllib.parse.unquote(address.path) == str(tmp_path / "r #1/traces/step_5.json")
    assert not link.startswith("/")


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
        step_ms = sum(ms[name] for name in telemetry.STEP_PHASES)
        yield {"step": every * k, "train/loss": 5 * k**-0.1 + rng.normal(0, 0.02),
               "train/grad_norm": rng.uniform(0.9, 1.1), "train/learning_rate": 1e-3,
               "perf/step_ms": step_ms, "perf/step_ms_median": step_ms, "perf/mfu": 0.4,
               "perf/tflops": 100 / step_ms, "perf/tokens_per_second": 1e6 / step_ms,
               "memory/host_rss_gb": 1.0, "memory/peak_gb": 60.0, "ranks_ms": [40.0] * 7 + [60.0],
               "perf/slowest_rank": 7, "perf/slowest_rank_ratio": 1.5, "perf/slowest_rank_phase": 0,
               **{f"perf/{name}_ms": value for name, value in ms.items()},
               **{f"health/update_ratio/blocks.{i}": 1e-3 * (i + 1) for i in range(32)}}
        if k == logs // 3:
            yield {"step": every * k - 7, "anomaly": "loss spike", "value": 9.0, "median": 2.0,
                   "steps": 1, "rank": 3}


def test_a_long_run_is_thinned_and_loses_no_event(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "POINTS", 100)
    monkeypatch.setattr(page, "CELLS", 30)
    write_rows(tmp_path / "r", long_run(180, slow_from=121))
    (told,) = make_page(tmp_path, tmp_path / "r")["runs"]
    lines = told["logs"]
    assert {len(column) for column in lines.values()} == {page.POINTS}
    losses = [row["train/loss"] for row in long_run(180, 121) if "train/loss" in row]
    assert min(lines["train/loss low"]) == pytest.approx(min(losses), rel=1e-3)
    assert max(lines["train/loss high"]) == pytest.approx(max(losses), rel=1e-3)
    assert np.mean(lines["train/loss"]) == pytest.approx(np.mean(losses), rel=1e-2)
    kinds = {event["kind"]: event for event in told["events"]}
    assert kinds["anomaly"]["step"] == 2_993 and "9" in kinds["anomaly"]["text"]
    assert abs(kinds["slow-down"]["step"] - 6_001) <= 100
    assert kinds["slow-down"]["text"].count("data +") == 1
    assert len(told["heat"]["ranks"]) == 1 + 8 and len(told["heat"]["ranks"]["7"]) == page.CELLS


@pytest.mark.slow
def test_rows_are_not_kept(tmp_path):
    """Neither by the report nor by the page, which keeps the numbers that it draws."""
    peaks = []
    for logs in (300, 600):
        write_rows(tmp_path / "r", long_run(logs, slow_from=201))
        tracemalloc.start()
        report(tmp_path / "r", page.Charts().add)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    size_of_rows = (tmp_path / "r/metrics.jsonl").stat().st_size / 2
    assert peaks[1] - peaks[0] < 0.25 * size_of_rows


def write_evil_run(folder):
    row = {"step": 1, "sample": EVIL, f"train/loss/{EVIL}": 1.0, "perf/step_ms": 3.0,
           "train/loss": None, "perf/mfu": 10**400, "ranks_ms": [EVIL, None, {}]}
    write_rows(folder, [
        row, row | {"step": 2, "perf/mfu": 0.5}, {"step": 2, "hang": EVIL},
        {"step": 2, "runs_out": EVIL}, row | {"step": 10**400},
        {"step": 2, "anomaly": EVIL, "rank": EVIL, "value": 1, "median": 1,
         "first_bad_layer": EVIL}])
    (folder / "config.yaml").write_text(f"# commit: {EVIL}\n{json.dumps({EVIL: EVIL})}\n")


def test_no_text_of_a_run_becomes_markup(tmp_path):
    folder = tmp_path / EVIL.replace("/", "")
    write_evil_run(folder)
    (told,) = make_page(tmp_path, folder)["runs"]
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == text.count("</script>") == 2 and "<img" not in text
    assert told["step"] == 2 and told["samples"][0]["text"] == EVIL
    assert told["config"] == {EVIL: EVIL}


def test_what_cannot_be_drawn_leaves_the_rest_of_its_row(tmp_path):
    """As a fork's own metrics: the row still counts in the report and on the page."""
    rows = list(long_run(40, slow_from=99))
    odd = {"own/flag": True, "own/text": "x", "own/list": [1.0], "train/grad_norm": "x",
           "perf/mfu": "high", "perf/data_fraction": None, "perf/tokens_per_second": math.nan,
           "perf/forward_ms": 1e308, "perf/slowest_rank": -1, "goodput/wall_s": 1}
    write_rows(tmp_path / "r", [row | odd for row in rows])
    (tmp_path / "r/config.yaml").write_text("a: [")
    (told,) = make_page(tmp_path, tmp_path / "r")["runs"]
    assert told["step"] == 2000 and len(told["logs"]["step"]) == 40
    assert told["logs"]["train/loss"][-1] == pytest.approx(rows[-1]["train/loss"], rel=1e-3)
    assert told["logs"].keys() & odd.keys() == {"goodput/wall_s"}
    found = report(tmp_path / "r")
    assert found["figures"]["train/loss"] == rows[-1]["train/loss"]


def test_a_run_that_diverged_says_so_first(tmp_path):
    rows = list(long_run(40, slow_from=99))
    write_rows(tmp_path / "r", [row | {"train/loss": 4.0 if row["step"] < 1000 else 9.0}
                                for row in rows])
    (told,) = make_page(tmp_path, tmp_path / "r")["runs"]
    (event,) = [event for event in told["events"] if event["kind"] == "diverged"]
    assert event["text"] == told["verdict"][0] and 900 < event["step"] <= 1000


def test_a_table_of_many_columns_has_fewer_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "NUMBERS", 5000)
    losses = {f"train/loss/{i}": 1 / 3 for i in range(200)}
    write_rows(tmp_path / "r", [row | losses for row in long_run(40, slow_from=50)])
    (told,) = make_page(tmp_path, tmp_path / "r")["runs"]
    assert (tmp_path / "page.html").stat().st_size < 3 * 10**5
    assert 10 < len(told["logs"]["step"]) < 30


def test_what_cannot_be_read_or_written_is_one_line(tmp_path, capsys):
    write_rows(tmp_path / "r", long_run(3, 9))
    assert main([str(tmp_path / "r"), "--html", str(tmp_path / "none/page.html")]) == 2
    assert main([str(tmp_path / "none"), "--html", str(tmp_path / "page.html")]) == 2
    metrics = (tmp_path / "r/metrics.jsonl").read_bytes()
    assert main([str(tmp_path / "r"), "--html", str(tmp_path / "r/metrics.jsonl")]) == 2
    assert (tmp_path / "r/metrics.jsonl").read_bytes() == metrics
    assert [line.partition(" error: ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "monitor.py:"] * 3


def test_text_that_is_no_unicode_is_escaped(tmp_path, capsys):
    write_rows(tmp_path / "r", [{"step": 1, "hang": "\udcff"}])
    make_page(tmp_path, tmp_path / "r")
    make_page(tmp_path, tmp_path / "r")  # an older page may be there
    assert "no progress: \\udcff" in capsys.readouterr().out


def get(address, host=None) -> bytes:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


@pytest.fixture
def served(tmp_path):
    """(the address at which the page of tmp_path/r is served, its rows so far)"""
    write_rows(tmp_path / "r", long_run(3, 9))
    server = page.make_server([tmp_path / "r"])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_watched_page_grows_with_its_run(tmp_path, served):
    assert b"uPlot" in get(served + "/")
    before = json.loads(get(served + "/data"))
    write_rows(tmp_path / "r", long_run(5, 9))
    after = json.loads(get(served + "/data"))
    assert (before["runs"][0]["step"], after["runs"][0]["step"]) == (150, 250)
    assert after["again_s"] >= 1
    for path, host in (("/metrics.jsonl", None), ("/data", "evil.example:80")):
        with pytest.raises(urllib.error.HTTPError):
            get(served + path, host)


def test_a_tab_that_is_closed_says_nothing_and_tabs_share_the_work(
        tmp_path, served, monkeypatch, capsys):
    read = []
    monkeypatch.setattr(page, "report", lambda *args: read.append(time.sleep(0.2)) or report(*args))
    write_rows(tmp_path / "r", long_run(4, 9))
    tabs = [threading.Thread(target=get, args=(served + "/data",)) for _ in range(4)]
    for tab in tabs:
        tab.start()
    address = served.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((address[0], int(address[1]))) as tab:
            tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            tab.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
    for tab in tabs:
        tab.join()
    get(served + "/data")
    assert len(read) == 1 and capsys.readouterr().err == ""


def test_the_library_is_the_one_whose_checksum_is_noted(tmp_path):
    library = (page.PARTS / "uPlot.iife.min.js").read_bytes()
    assert hashlib.sha256(library).hexdigest() in page.__doc__
    write_rows(tmp_path / "r", [])
    make_page(tmp_path, tmp_path / "r")
    assert (page.PARTS / "uPlot.LICENSE").read_text() in (tmp_path / "page.html").read_text()


# --- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = map(shutil.which, ("chromium", "chromedriver"))
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1300,1600"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def show(browser, address) -> list[str]:
    """Open it; returns what it asked for and what the console says."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of earlier pages
    browser.get(str(address))
    wait(browser, "return plots.length && plots.every(u => u.status)")
    return said(browser)


def said(browser) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events
             if event["method"] == "Network.requestWillBeSent"]
    return ([url for url in asked if not url.startswith(("file:", "data:"))]
            + [entry["message"] for entry in browser.get_log("browser")])


def wait(browser, condition: str):
    for _ in range(600):
        if found := browser.execute_script(condition):
            return found
        time.sleep(0.1)
    raise AssertionError(f"never: {condition}")


PHASES_CHART = "plots.find(u => u.root.parentNode.textContent.startsWith('Step time'))"


def planted(step: int):
    """From this step on each batch takes 30 ms longer."""
    plain, seed_everything, now = train.Mixture.batch, train.seed_everything, [0]

    def seed(seed, step, rank):
        now[0] = step
        seed_everything(seed, step, rank)

    def batch(self, *args):
        time.sleep(0.03 * (now[0] >= step))
        return plain(self, *args)

    train.seed_everything, train.Mixture.batch = seed, batch


@pytest.mark.slow
def test_a_browser_shows_the_planted_slow_down(browser, tmp_path, corpus):
    """From a file: no console error, no request; hover, zoom, keys, legend."""
    flags = [*conftest.TINY, "--data", corpus, "--out_dir", "r", "--num_workers", 0, "--max_steps",
             600, "--log_interval", 10, "--monitor", "full", "--eval_interval", 100,
             "--sample_interval", 200, "--no_tensorboard"]
    assert conftest.Process(tmp_path, flags, lambda: planted(400)).code(300) == 0
    (told,) = make_page(tmp_path, tmp_path / "r")["runs"]
    (event,) = [e for e in told["events"] if "the loop waits for data" in e["text"]]
    assert 370 <= event["step"] <= 430
    assert show(browser, (tmp_path / "page.html").as_uri()) == []
    assert "the loop waits for data" in browser.find_element("id", "head").text
    trace = browser.find_element("css selector", "#head a[href*=traces]")
    assert trace.get_attribute("href").startswith((tmp_path / "r/traces").as_uri())
    slow = [e for e in told["events"] if e["kind"] == "slow-down"]
    assert len(browser.find_elements("class name", "bad")) == len(slow)
    assert f"step {event['step']}, slow-down" in browser.find_element("id", "events").text

    # hover: the values of every chart at that step, and what happened there
    from selenium.webdriver import ActionChains, Keys

    chart = browser.execute_script(f"return {PHASES_CHART}.over")
    figure = browser.execute_script(f"return {PHASES_CHART}.root.parentNode")
    ActionChains(browser).move_to_element_with_offset(chart, chart.size["width"] // 3, 0).perform()
    wait(browser, f"return {PHASES_CHART}.root.parentNode.innerText.includes('the loop waits')")
    shown = browser.execute_script(f"return {PHASES_CHART}.legend.values")
    step = int(shown[0]["_"])
    at = told["logs"]["step"].index(step)
    ms = told["logs"]["perf/data_ms"][at]
    assert 450 < step < 550 and float(shown[1]["_"]) == pytest.approx(ms, rel=1e-3)
    loss = browser.execute_script("return plots[0].legend.values[1]._")
    assert float(loss) == pytest.approx(told["logs"]["train/loss"][at], rel=1e-3)

    # a drag zooms all charts; the button shows everything again
    range_of = "const {min, max} = plots[%d].scales.x; return [min, max]"
    ActionChains(browser).move_to_element_with_offset(chart, -100, 0).click_and_hold(
        ).move_by_offset(100, 0).release().perform()
    wait(browser, "return zoom")
    zoomed = [browser.execute_script(range_of % i) for i in (0, 1, 3)]
    assert zoomed[0] == zoomed[1] == zoomed[2] and 0 < zoomed[0][0] < zoomed[0][1] < 600
    browser.find_element("id", "zoom").click()
    assert browser.execute_script(range_of % 0) == [0, 600]

    # by keyboard
    browser.execute_script("arguments[0].focus()", figure)
    figure.send_keys(Keys.HOME, Keys.ARROW_RIGHT, "+", "+")
    low, high = wait(browser, "return zoom")
    assert high - low == pytest.approx(150, abs=5)
    figure.send_keys(Keys.ESCAPE)
    assert browser.execute_script("return zoom") is None

    # a phase that is hidden leaves the stack
    top = f"return {PHASES_CHART}.data.at(-1).at(-1)"
    before = browser.execute_script(top)
    figure.find_elements("css selector", ".u-series th")[1].send_keys(Keys.ENTER)
    after = wait(browser, f"return {PHASES_CHART}.data.at(-1).at(-1) < {before} && {top[7:]}")
    assert before - after == pytest.approx(told["logs"]["perf/data_ms"][-1], rel=1e-2)
    assert said(browser) == []


@pytest.mark.slow
def test_a_browser_compares_two_runs(browser, tmp_path):
    rows = list(long_run(720, slow_from=9999))
    for k, row in enumerate(rows, 1):
        slow = 20 * (k // 60 % 2) * ("perf/data_ms" in row)
        for name in ("perf/data_ms", "perf/step_ms", "perf/step_ms_median"):
            row[name] = row.get(name, 0.0) + slow
        row["perf/tflops"] = 100 / row["perf/step_ms"] if row["perf/step_ms"] else 0.0
        row |= {"train/tokens": 1000 * row["step"], "train/learning_rate": 1.23456e-7}
        row["train/loss"] = 300.0 if k < 4 else 4.0 * 0.995**k
        row["perf/evaluation_ms"] = 500.0 * (k % 20 == 0)
    write_rows(tmp_path / "a/run", [row for row in rows if "perf/tflops" in row])
    write_rows(tmp_path / "b/run", rows[:60])
    one, _ = make_page(tmp_path, tmp_path / "a/run", tmp_path / "b/run")["runs"]
    assert show(browser, (tmp_path / "page.html").as_uri()) == []
    js = browser.execute_script
    assert browser.title == "a, b" and js("return plots[0].series[1].label") == "train a"
    slow = [event for event in one["events"] if event["kind"] == "slow-down"]
    assert len(slow) == 6 and "1 more slow-down" in browser.find_element("id", "head").text
    # evaluations are left out, until asked for
    assert js(f"return {PHASES_CHART}.cut") == ""
    js(f"{PHASES_CHART}.root.querySelectorAll('.u-series')[8].querySelector('th').click()")
    wait(browser, f"return {PHASES_CHART}.cut.startsWith('▲ up to 5')")
    # the first loss is huge, the rest falls to a tenth: a logarithmic axis, or one that is cut
    assert js("return plots[0].scales.y.distr") == 3
    js("document.querySelector('h2 button').click()")
    wait(browser, "return plots[0].scales.y.max < 20 && plots[0].cut.includes('300')")
    # tokens as the x axis, for events too
    js("document.querySelectorAll('#tools button')[1].click()")
    wait(browser, "return plots[0].scales.x.max == 36e6")
    assert js("return page.runs[0].x(100)") == 100_000
    # no empty space below a chart, and its right axis has room for its numbers
    cards = js("return [...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect()"
               ".bottom - f.lastElementChild.getBoundingClientRect().bottom)")
    assert len(cards) > 5 and max(cards) < 20
    assert js("return plots.find(u => u.root.parentNode.ariaLabel.startsWith('Gradient'))"
              ".axes[2]._size > 7 * '1.23e-7'.length")
    assert js("return document.querySelectorAll('.scale').length") == 4
    assert said(browser) == []


@pytest.mark.slow
def test_a_browser_runs_no_text_of_a_run(browser, tmp_path):
    folder = tmp_path / EVIL.replace("/", "")
    write_evil_run(folder)
    make_page(tmp_path, folder, folder)
    assert show(browser, (tmp_path / "page.html").as_uri()) == []
    assert browser.title == f"{folder.name}, {folder.name}"
    assert browser.execute_script("return document.images.length + document.scripts.length") == 2
    assert browser.find_element("tag name", "pre").text == EVIL


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_a_phone(browser, tmp_path, scheme):
    write_rows(tmp_path / "r", long_run(100, slow_from=60))
    make_page(tmp_path, tmp_path / "r", tmp_path / "r")
    screen = dict(width=360, height=740, deviceScaleFactor=2, mobile=True)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", dict(enabled=True))
    preference = [dict(name="prefers-color-scheme", value=scheme)]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=preference))
    try:
        assert show(browser, (tmp_path / "page.html").as_uri()) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
        box = browser.execute_script("plots[0].over.scrollIntoView({block: 'center'});"
                                     "const b = plots[0].over.getBoundingClientRect();"
                                     "return {x: b.x + 40, y: b.y + 40}")
        for kind, x in (("Start", 0), ("Move", 40), ("Move", 120), ("End", None)):  # a finger
            points = [] if x is None else [{"x": box["x"] + x, "y": box["y"]}]
            browser.execute_cdp_cmd("Input.dispatchTouchEvent",
                                    dict(type=f"touch{kind}", touchPoints=points))
        wait(browser, "return zoom")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", dict(enabled=False))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[]))


@pytest.mark.slow
def test_a_watched_page_is_drawn_anew_where_it_was_zoomed(browser, tmp_path, served):
    show(browser, served)
    browser.execute_script("setZoom([50, 100]); document.querySelector('details').open = true")
    write_rows(tmp_path / "r", long_run(60, 99))
    wait(browser, "return page.runs[0].step == 3000")
    assert browser.execute_script("return plots[0].scales.x.max") == 100
    assert browser.execute_script("return document.querySelector('details').open")
