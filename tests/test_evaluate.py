"""`python model.py eval`: the scores that lm-evaluation-harness gives the exported model."""

# ruff: noqa: F401, F811 -- fixtures of another file

import json
import shutil
import sys

import pytest
from test_huggingface import run_of_60_steps, trained

from tools import generate as generation

CHOICE = """
task: sums
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """
task: text
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITTEN = """
task: written
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "7"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: DIR/sums.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder with three tasks, one of each kind of request."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    docs = [dict(question=f"{a} + {b} =", choices=[f" {a + b + i}" for i in range(3)], answer=0)
            for a in range(6) for b in range(5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for i, task in enumerate((CHOICE, TEXT, WRITTEN)):
        (folder / f"{i}.yaml").write_text(task + DATA.replace("DIR", str(tmp_path)))
    return folder


def test_what_cannot_be_evaluated_is_one_line(trained, tasks, tool, monkeypatch):
    def refused(*flags):
        told = tool(generation.main, "eval", "r", *flags, expect=2).err
        assert told.count("\n") == 1
        return told

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)
        assert "pip install 'lm_eval[hf]'" in refused("--tasks", str(tasks))
    shutil.copy(tasks / "0.yaml", "here.yaml")  # nobody asked for it
    assert "--tasks: expected names" in refused()
    assert "--batch_size 0" in refused("--batch_size", "0")


@pytest.mark.slow
def test_scores_are_those_of_the_harness_for_an_export(trained, tasks, tool):
    lm_eval = pytest.importorskip("lm_eval")
    assert generation.main(["export", "r", "out"]) == 0
    flags = ["--limit", "20", "--num_fewshot", "1", "--json", "--tasks"]
    found = json.loads(tool(generation.main, "eval", "r", *flags, tasks).out)
    expected = lm_eval.simple_evaluate(
        "hf", dict(pretrained="out", device="cpu"), tasks=["sums", "text", "written"], limit=20,
        num_fewshot=1, task_manager=lm_eval.tasks.TaskManager(
            include_path=str(tasks), include_defaults=False))["results"]
    assert found.keys() == expected.keys() == {"sums", "text", "written"}
    for task, scores in expected.items():
        numbers = {name: x for name, x in scores.items() if isinstance(x, float)}
        assert len(numbers) >= 2 and numbers == pytest.approx(
            {name: found[task][name] for name in numbers}, rel=1e-5, nan_ok=True)
    assert 0 < found["sums"]["acc,none"] < 1
    table = tool(generation.main, "eval", "r/checkpoints/best.pt", "--limit", "9", "--tasks",
                 f"{tasks / '0.yaml'},{tasks / '1.yaml'}").out
    assert "|sums" in table and "|text" in table and "written" not in table
    told = tool(generation.main, "eval", "out", "--tasks", "suns", expect=2).err
    assert "--tasks suns: " in told.splitlines()[-1]
