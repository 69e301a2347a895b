"""Each family from chats to a model one talks to: prepare, show, tune, resume, export, chat.

And what comes out compared with transformers.
"""

import io
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, column
from families import FAMILIES, chat
from test_talk import folder_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from steady.tokens.files import TokenFile
from tools import generate as generation
from tools import prepare

pytestmark = pytest.mark.slow
TALKS = [chat("system: Be brief.", f"user: {a} + {b}?", f"assistant: It is {a + b}.",
              "user: Sure?", "assistant: Yes.") for a in range(8) for b in range(8)]


@pytest.mark.parametrize("family", FAMILIES)
def test_from_chats_to_a_talk(tmp_path, run, tool, monkeypatch, family):
    folder_of(tmp_path / "base", family, std=None)
    Path("chats.jsonl").write_text("".join(json.dumps(dict(messages=m)) + "\n" for m in TALKS))
    command = ["chats.jsonl", "--out", "chats", "--tokenizer", "base", "--val_fraction", "0.1"]
    assert prepare.main(command) == 0
    assert "⟦" in tool(prepare.main, "show", "chats", 1).out
    flags = ["--init_from", "base", "--data", "chats", "--learning_rate", 3e-3, "--seq_len", 192,
             "--batch_size", 8, "--warmup_steps", 2, "--log_interval", 5, "--eval_steps", 2,
             "--precision", "fp32", "--save_interval", 10, "--max_steps", 20, "--out_dir"]
    run(*flags, "r", bare=True)
    losses = column(tmp_path / "r", "train/loss")
    assert losses[20] < 0.8 * losses[1]
    run(*flags, "s", "--resume", "r/checkpoints/step_00000010.pt", bare=True)
    assert column(tmp_path / "s", "train/loss")[20] == losses[20]
    assert generation.main(["export", "r", "out"]) == 0

    theirs = AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32).eval()
    ours, tokenizer, _ = generation.open_model(tmp_path / "r")
    ours.eval()
    file = TokenFile(tmp_path / "chats/train.bin")
    begin, end = file.documents()[:2].tolist()
    ids = torch.from_numpy(file.tokens[begin:end].astype(np.int64))[None]
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours(ids) - expected).abs().max() < 1e-3 * expected.abs().max()
        labels = ids.masked_fill(torch.from_numpy(file.mask[begin:end] == 0)[None], -100)
        targets = labels[:, 1:]
        mean = ours(ids[:, :-1], targets).sum() / (targets != -100).sum()
        assert abs(mean - theirs(ids, labels=labels).loss) < 1e-4 * mean

    prompt = tokenizer.apply_chat_template(TALKS[0][:2], add_generation_prompt=True,
                                           return_dict=True, return_tensors="pt")["input_ids"]
    answers = []
    for source in ("r", "out", "base"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(TALKS[0][1]["content"]))
        answers.append(tool(generation.main, "chat", source, "--system", "Be brief.",
                            "--temperature", 0, "--max_new_tokens", 12).out)
    assert answers[0] == answers[1]
    new = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    new = tokenizer.decode(new[0, prompt.shape[1]:], skip_special_tokens=True)
    assert new.startswith(answers[1].rstrip("\n"))


def test_commands_of_the_page_run_as_written(tmp_path, run, tool, monkeypatch):
    """With a small model, few steps, and a prompt in place of a terminal."""
    folder_of(tmp_path / "base", "qwen3", std=None)
    Path("chats").mkdir()
    Path("chats/a.jsonl").write_text("".join(json.dumps(dict(messages=m)) + "\n" for m in TALKS))
    few = "--seq_len 192 --batch_size 2 --max_steps 4 --eval_steps 1 --precision fp32".split()
    page = (ROOT / "docs/finetuning.md").read_text()
    Path("tasks").mkdir()
    Path("tasks/mine.yaml").write_text(page.split("```yaml\n")[1].split("```")[0].replace(
        "/absolute/path", str(tmp_path)))
    Path("mine.jsonl").write_text('{"question": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}\n')
    done = []
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        _, script, *argv = shlex.split(block.replace("Qwen/Qwen3-0.6B", "base"))
        done.append(f"{script} {argv[0]}")
        monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 1?"))
        if "--eval_only" in argv:
            told = run(*argv, "--val_data", "tokens/train.bin", bare=True)  # too few for both
            assert re.search(r"validation loss \S+ \([\d,]+ tokens\) ", told)
        elif script == "train.py":
            assert "step 4/4" in run(*argv, *few, bare=True)
        elif argv[0] != "eval" or find_spec("lm_eval"):
            told = tool((prepare if script == "data.py" else generation).main, *argv).out
            assert "--- 2 of 2" in told or "--prompt" not in argv
    assert done == ["data.py chats/", "data.py show", "train.py --init_from", "model.py chat",
                    "model.py generate", "model.py export", "train.py --eval_only", "model.py eval"]
    assert AutoTokenizer.from_pretrained("out").chat_template
