"""How a run ends, and with which weights: averages, the clock, a line for programs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import TINY, after_updates, assert_same_end, before, column, poison, saved, steps

import config
import train
from steady.checkpoints.run_dir import summary
from steady.guard import deadline
from steady.options import UNKNOWN
from tools import generate

WITHOUT_STEPS = TINY[: TINY.index("--max_steps")] + TINY[TINY.index("--warmup_steps"):]
END = "max_steps", "best_loss"  # what more has to be the same


# --- averages --------------------------------------------------------------------------------


def test_averages_follow_the_weights_and_are_evaluated_and_resumed(run, tmp_path):
    """Also with a tied head, and as the mean loss of a model that has them as its weights."""
    flags = ["--ema", 0.7, "--save_interval", 1, "--keep_checkpoints", 99, "--eval_interval", 6,
             "--tie_embeddings", "--learning_rate", 0.02]
    run(*flags, "--out_dir", "r")
    first, last = saved(tmp_path / "r", 1), saved(tmp_path / "r", 12)
    assert first["model"].keys() - {"cos", "sin"} == last["ema"].keys()
    torch.manual_seed(1337)  # the initial weights
    cfg = config.Config(**last["config"])
    model = train.Transformer(cfg)
    torch.manual_seed(1337)
    model.init_weights()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(1, 13):
        weights = saved(tmp_path / "r", step)["model"]
        decay = min(0.7, (1 + step) / (10 + step))
        for name, average in expected.items():
            average.lerp_(weights[name], 1 - decay)
    for name, average in expected.items():
        assert torch.equal(last["ema"][name], average), name
        assert not torch.equal(average, last["model"][name])
    loss, averaged = (column(tmp_path / "r", f"val/{name}") for name in ("loss", "loss_ema"))
    assert list(averaged) == [6, 12] and averaged != loss
    assert last["best_loss"] == min(averaged.values())

    model.load_state_dict(last["model"] | last["ema"])
    alone = SimpleNamespace(micro_batch=16, rank=0, world_size=1, device=torch.device("cpu"))
    with torch.no_grad():
        batch = next(train.eval_batches(train.load_data(cfg)[1], 16, alone))
        assert averaged[12] == pytest.approx(model.eval()(*batch[:2]).mean().item(), rel=1e-5)

    run("--resume", "r/checkpoints/step_00000005.pt", "--out_dir", "s", bare=True)
    assert_same_end(tmp_path / "r", tmp_path / "s", *END)


@pytest.mark.parametrize("way", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_averages_on_two_ranks_are_those_of_one(run, tmp_path, way):
    flags = ["--ema", 0.9, "--eval_interval", 6, "--optimizer", "adamw", "--save_interval", 6]
    run(*flags, "--out_dir", "one")
    run(*flags, "--out_dir", "two", "--parallel", way, ranks=2)
    one, two = (column(tmp_path / name, "val/loss_ema") for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5) and list(one) == [6, 12]
    one, two = (saved(tmp_path / name, 12)["ema"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, average in one.items():
        torch.testing.assert_close(two[name], average, rtol=1e-3, atol=1e-5)
    run("--auto_resume", "--out_dir", "two", "--max_steps", 14, bare=True)  # on one rank


def test_averages_may_begin_later_and_end_earlier(run, tmp_path):
    run("--out_dir", "r")
    run("--auto_resume", "--out_dir", "r", "--ema", 0.5, "--max_steps", 13, bare=True)
    before, after = saved(tmp_path / "r", 12)["model"], saved(tmp_path / "r", 13)
    for name, average in after["ema"].items():
        torch.testing.assert_close(average, before[name].lerp(after["model"][name], 0.5))
    run("--auto_resume", "--out_dir", "r", "--ema", 0, "--max_steps", 14, bare=True)
    assert saved(tmp_path / "r", 14)["ema"] == {}


# --- the clock -------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A step takes two seconds, and the process began 10 s ago; steps are set at step 5."""
    now = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(deadline, "process_age_seconds", lambda: 10.0)
    monkeypatch.setattr(deadline, "SETTING_STEP", 5)

    def pass_by(run):
        now[0] += 2.0

    before(train.Run, "advance", pass_by, monkeypatch.setattr)
    return now


def test_steps_fit_into_the_minutes_and_a_resume_keeps_them(run, corpus, tmp_path, clock):
    flags = [*WITHOUT_STEPS, "--data", corpus, "--max_minutes", 1, "--eval_interval", 0,
             "--save_interval", 3, "--keep_checkpoints", 99, "--on_nonfinite", "rollback"]
    told = run(*flags, "--out_dir", "whole", bare=True)
    # 50 s are left at the start, 40 at step 5; less 2 % and 2 s
    last = 5 + int((40 * 0.98 - 2) / 2)
    assert f"step 5: {last} steps fit into" in told and "step 1/?" in told
    rates = column(tmp_path / "whole", "train/learning_rate")
    assert max(rates) == last and 0 < rates[last] < 0.1 * max(rates.values())  # all of the schedule

    run("--resume", "whole/checkpoints/step_00000006.pt", "--out_dir", "s", bare=True)
    assert_same_end(tmp_path / "whole", tmp_path / "s", *END)
    assert "nothing to do" in run("--auto_resume", "--out_dir", "s", bare=True)
    run("--auto_resume", "--out_dir", "s", "--max_steps", last + 2, bare=True)  # in its place
    assert saved(tmp_path / "s", last + 2)["max_steps"] == UNKNOWN
    run("--resume", "whole/checkpoints/step_00000003.pt", "--out_dir", "t", "--max_minutes", 2,
        "--save_interval", 99, "--max_nonfinite", 1, bare=True, hook=lambda rank: poison(80, 96))
    assert saved(tmp_path / "t")["max_steps"] < UNKNOWN  # set before the rollback to step 3


@pytest.mark.parametrize("minutes, every, said", [
    (1, 10, "step 5: 21 steps"),  # an evaluation takes 4/3 s
    (11 / 60, 0, "step 2: 2 steps")])  # late: it ends, with a checkpoint
def test_evaluations_and_a_late_start_are_counted(run, corpus, clock, minutes, every, said):
    told = run(*WITHOUT_STEPS, "--data", corpus, "--max_minutes", minutes, "--eval_interval", every,
               "--save_interval", 10, "--out_dir", "r", bare=True)
    assert f"{said} fit into" in told and f": {steps(Path('r'))[-1]} steps" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_are_slow_are_set_earlier(run, corpus, clock, monkeypatch, ranks):
    """In time, if step 20 just precedes a third of it; the warm-up ends before the run does."""
    monkeypatch.setattr(deadline, "SETTING_STEP", 100)
    told = run(*WITHOUT_STEPS, "--data", corpus, "--max_minutes", 2.4, "--eval_interval", 0,
               "--warmup_steps", 100, "--log_interval", 1, "--out_dir", "r", bare=True, ranks=ranks)
    last = 35 + int((64 * 0.98 - 2) / 2)
    assert f"step 35: {last} steps fit into" in told
    rates = column(Path("r"), "train/learning_rate")
    assert max(rates) == last and rates[last] < 0.2 * max(rates.values())


# --- a line for programs ---------------------------------------------------------------------


def test_the_last_line_is_json(run, tmp_path):
    found = json.loads(run("--json", "--out_dir", "r", "--eval_interval", 6).splitlines()[-1])
    assert found["step"] == 12 and found["train_loss"] == column(tmp_path / "r", "train/loss")[12]
    assert found["val_loss"] == column(tmp_path / "r", "val/loss")[12]
    assert found["checkpoint"] == "r/checkpoints/step_00000012.pt"
    assert found["best"] == "r/checkpoints/best.pt" and found["seconds"] > 0
    assert isinstance(found["verdict"], list) and found["val_loss_ema"] is None
    (tmp_path / "r/checkpoints/step_00000012.pt").unlink()
    with open(tmp_path / "r/metrics.jsonl", "a") as file:
        file.write('{"step": 12, "val/loss": null}\n')  # not finite
    found = summary(Path("r"))
    assert found["val_loss"] is None
    assert found["checkpoint"] == "r/checkpoints/step_00000006.pt"


def test_averages_are_what_leaves_a_run(run, tmp_path, capsys):
    """Exported, generated from, and trained further; tied and bytes, so that all of it is there."""
    run("--ema", 0.9, "--tie_embeddings", "--out_dir", "r")
    state = saved(tmp_path / "r", 12)
    assert generate.main(["export", "r", "out"]) == 0 and "out" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    embedding = model.get_input_embeddings().weight[:257]
    assert torch.equal(embedding, state["ema"]["embedding.weight"][:257])
    ours, _, _ = generate.open_model(Path("r"))
    assert torch.equal(ours.norm.weight, state["ema"]["norm.weight"])
    run("--init_from", "out", "--out_dir", "s", "--max_steps", 2, "--learning_rate", 1e-9)
    torch.testing.assert_close(saved(tmp_path / "s", 2)["model"]["norm.weight"],
                               state["ema"]["norm.weight"])


# --- what must not go wrong with them --------------------------------------------------------


def test_the_configuration_of_a_run_by_the_clock_starts_another_one(run, corpus, tmp_path, clock):
    flags = [*WITHOUT_STEPS, "--data", corpus, "--eval_interval", 0]
    run(*flags, "--max_minutes", 0.5, "--out_dir", "r", bare=True)
    run("--auto_resume", "--out_dir", "r", bare=True)
    for name, minutes in (("s", 0.5), ("t", 0.4)):
        clock[0] = 0.0
        told = run("--config", "r/config.yaml", "--max_minutes", minutes, "--out_dir", name,
                   bare=True)
        assert f"steps fit into --max_minutes {minutes:g}" in told
    clock[0] = 0.0
    told = run("--auto_resume", "--out_dir", "t", "--max_minutes", 1, bare=True)  # goes on
    assert "steps fit into --max_minutes 1" in told
    told = run(*flags, "--max_minutes", 1, "--verify_resume", 2, bare=True, expect=2)
    assert "--max_minutes: not with --verify_resume" in told


@pytest.mark.slow
def test_the_line_for_programs_comes_also_from_odd_runs(run, monkeypatch):
    told = run("--out_dir", "r", "--parallel", "zero3", "--json", ranks=2)
    (line,) = re.findall("^{.*}$", told, re.M)
    told = run("--auto_resume", "--out_dir", "r", "--json", bare=True)
    assert "nothing to do" in told
    for found in (json.loads(line), json.loads(told.splitlines()[-1])):
        assert found["step"] == 12 and found["best"] == "r/checkpoints/best"
        assert found["checkpoint"] == "r/checkpoints/step_00000012"
    told = run("--out_dir", "s", "--json", "--monitoring", "off", "--log_interval", 0)
    assert json.loads(told.splitlines()[-1])["train_loss"] is None
    after_updates(lambda run: Path("t/metrics.jsonl").unlink(missing_ok=True), monkeypatch.setattr)
    found = json.loads(run("--out_dir", "t", "--json").splitlines()[-1])
    assert found["train_loss"] is None and found["checkpoint"].endswith("step_00000012.pt")
