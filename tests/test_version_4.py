"""What is exported, as transformers 4 reads it: the logits, tokens and ends of version 5.

STEADY_TRANSFORMERS_4 names a folder with the older version, as .ci/run makes one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, TEXT
from test_families import TALKS
from test_huggingface import FAMILIES as ROPES
from test_huggingface import KINDS, save_random
from test_talk import folder_of
from transformers import AutoModelForCausalLM

from steady.tokens.tokenizers import byte_tokenizer, load_tokenizer
from tools import generate as generation
from tools import prepare

FOLDER = os.environ.get("STEADY_TRANSFORMERS_4")
pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not FOLDER, reason="needs transformers 4 (STEADY_TRANSFORMERS_4)")]
READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4.57"), transformers.__version__
found = {}
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = torch.load(f"{folder}/expected.pt")
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    found[folder] = dict(
        difference=((logits - expected["logits"]).abs().max() / logits.abs().max()).item(),
        tokens=tokenizer(expected["text"])["input_ids"] == expected["tokens"],
        template=tokenizer.chat_template == expected["template"],
        ends=model.generation_config.eos_token_id)
print(json.dumps(found))
"""


def test_version_4_reads_an_export_as_version_5_does(run, corpus, tmp_path):
    flags = ["--max_steps", 1, "--precision", "fp32", "--batch_size", 2, "--eval_interval", 0,
             "--no_tensorboard", "--seq_len"]
    Path("chats.jsonl").write_text("".join(json.dumps(dict(messages=m)) + "\n" for m in TALKS))
    for name in FAMILIES:
        folder_of(tmp_path / name, name, std=None)
        assert prepare.main(["chats.jsonl", "--out", f"{name}-chats", "--tokenizer", name]) == 0
        run("--init_from", name, "--data", f"{name}-chats", "--out_dir", f"{name}-run", *flags, 192,
            bare=True)
    for name in ("llama3 rope", "linear rope"):
        save_random(tmp_path / name, ROPES[name](), byte_tokenizer())
        run("--init_from", name, "--data", corpus, "--out_dir", f"{name}-run", *flags, 64,
            bare=True)
    for name, more in KINDS.items():
        run("--out_dir", f"own {name}-run", "--max_steps", 2, *more)

    folders = []
    for source in sorted(tmp_path.glob("*-run")):
        out = source.with_name(source.name.replace("-run", "-out"))
        assert generation.main(["export", str(source), str(out)]) == 0
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        tokenizer = load_tokenizer(str(out))  # not as version 5 misreads the name of a class
        ids = torch.randint(model.config.vocab_size, (1, 120))
        with torch.no_grad():
            logits = model(ids).logits
        torch.save(dict(ids=ids, logits=logits, text=TEXT, tokens=tokenizer(TEXT)["input_ids"],
                        template=tokenizer.chat_template), out / "expected.pt")
        folders.append(out)
    printed = subprocess.run([sys.executable, "-c", READ, *map(str, folders)], check=True,
                             stdout=subprocess.PIPE, env=os.environ | dict(PYTHONPATH=FOLDER))
    found = json.loads(printed.stdout.splitlines()[-1])
    assert len(found) == len(FAMILIES) + 2 + len(KINDS)
    for folder, told in found.items():
        assert told["difference"] < 1e-5 and told["tokens"] and told["template"], (folder, told)
        assert told["ends"], folder
