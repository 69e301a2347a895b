"""`python model.py chat`, and prompts of several lengths together."""

import builtins
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, environment
from families import config_of, tokenizer_of
from transformers import AutoModelForCausalLM, GPT2Config

from model import generate
from steady.tokens.tokenizers import byte_tokenizer
from tools import generate as generation
from tools import talk as talk_module


def folder_of(path, family: str, **generation_config):
    """A random model with the tokenizer of a family, or GPT-2 with that of bytes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer() if family == "gpt2" else tokenizer_of(family)
    found = GPT2Config(vocab_size=257, n_embd=64, n_layer=2, n_head=4, n_positions=128,
                       bos_token_id=None, eos_token_id=256)
    model = AutoModelForCausalLM.from_config(
        found if family == "gpt2" else config_of(family, tokenizer))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    for name, value in generation_config.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])  # ours, and through transformers
def test_prompts_of_several_lengths_together_are_answered_as_alone(tmp_path, capsys, family):
    folder = folder_of(tmp_path / "m", family)
    prompts = ["The cat", "", "1 + 2 = 3, and so on and so on", "naïve 猫"]
    flags = ["generate", str(folder), "--temperature", "0", "--max_new_tokens", "12"]
    alone = []
    for prompt in prompts:
        assert generation.main([*flags, "--prompt", prompt]) == 0
        alone.append(capsys.readouterr().out)
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    for source in (["--prompt", *prompts], ["--prompt_file", str(tmp_path / "p.txt")]):
        assert generation.main([*flags, *source]) == 0
        parts = re.split(r"--- \d of 4\n", capsys.readouterr().out)[1:]
        assert parts == alone
    (tmp_path / "empty").touch()
    several = [str(tmp_path / "p.txt"), "--prompt", "a"]
    for refused in (["none"], [str(tmp_path / "empty")], several):
        assert generation.main([*flags, "--prompt_file", *refused]) == 2


def test_text_that_is_not_utf8_is_refused_in_one_line(capsys):
    for command in (["generate", "m", "--prompt", "a", "b\udcff"],
                    ["chat", "m", "--system", "\udcff"]):
        assert generation.main(command) == 2
        told = capsys.readouterr().err
        assert "\\udcff': expected text in UTF-8" in told and told.count("\n") == 1


def test_padding_changes_nothing(tmp_path):
    folder = folder_of(tmp_path / "m", "qwen3")
    model, _ = generation.open_model(folder, 40)
    rows = [torch.randint(300, (n,)) for n in (3, 20, 11)]
    tokens = torch.stack([torch.nn.functional.pad(row, (20 - len(row), 0)) for row in rows])
    padding = torch.tensor([17, 0, 9])
    together = generate(model, tokens, 15, temperature=0, padding=padding)
    for row, out in zip(rows, together, strict=True):
        assert torch.equal(generate(model, row[None], 15, temperature=0)[0, len(row):], out[20:])


def test_what_the_files_of_a_model_say_of_sampling(tmp_path, run):
    folder = folder_of(tmp_path / "m", "gemma3", do_sample=True, temperature=0.3, top_k=7,
                       eos_token_id=[1, 5])
    writer = generation.Writer(folder, generation.ChatOptions(top_k=9))
    assert writer.sampling == dict(temperature=0.3, top_k=9, top_p=1.0)
    tokenizer = writer.tokenizer
    assert {1, 5, tokenizer.eos_token_id,
            tokenizer.convert_tokens_to_ids("<end_of_turn>")} == set(writer.stop)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(dict(do_sample=False, temperature=0.3)))
    assert generation.Writer(folder, generation.ChatOptions()).sampling["temperature"] == 0
    for odd in ([], dict(top_k=-1, top_p=0, temperature=-1),
                dict(temperature=float("nan"), top_k="x"),
                dict(top_p=[1], temperature=1e999)):
        path.write_text(json.dumps(odd))
        assert generation.usual_sampling(folder) == {}
    path.write_text(json.dumps(dict(top_k=5.0, temperature=1)))
    assert generation.usual_sampling(folder) == dict(temperature=1.0, top_k=5)
    assert type(generation.usual_sampling(folder)["top_k"]) is int  # as torch.topk wants it


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(folder, *lines, flags) → prompts that the model had, what was printed."""

    def talk(folder, *lines, flags=(), answer="Hi 猫."):
        prompts, rest = [], iter(lines)
        tokenizer = generation.load_tokenizer(str(folder), needs_end=False)
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]

        def generate(model, tokens, max_new_tokens, *, on_token, **how):
            prompts.append(tokenizer.decode(tokens[0].tolist()))
            for i in ids:
                on_token(torch.tensor([i]))
            if answer == "stopped":
                raise KeyboardInterrupt
            return torch.cat((tokens, torch.tensor([ids])), 1)

        def line(prompt):
            found = next(rest, EOFError)
            if isinstance(found, type):
                raise found
            return found

        monkeypatch.setattr(generation, "generate", generate)
        monkeypatch.setattr(builtins, "input", line)
        monkeypatch.setattr(sys, "stdin", Terminal())
        capsys.readouterr()
        assert generation.main(["chat", str(folder), *flags]) == 0
        return prompts, capsys.readouterr()

    return talk


def test_a_talk_remembers_and_forgets(tmp_path, talk):
    folder = folder_of(tmp_path / "m", "llama3")

    def written(*turns):
        turns = [turn.split(": ") for turn in turns]
        text = "".join(f"<|start_header_id|>{a}<|end_header_id|>\n\n{b}<|eot_id|>"
                       for a, b in turns)
        return f"<|begin_of_text|>{text}<|start_header_id|>assistant<|end_header_id|>\n\n"

    prompts, out = talk(folder, "Hello", "And?", "/reset", "Again", "/system Be brief.", "So?",
                        "/what", KeyboardInterrupt, "", "/system", "/reset", "Last")
    assert prompts == [
        written("user: Hello"), written("user: Hello", "assistant: Hi 猫.", "user: And?"),
        written("user: Again"),
        written("system: Be brief.", "user: Again", "assistant: Hi 猫.", "user: So?"),
        written("user: Last"),
    ]
    assert out.out.count("Hi 猫.\n") == 5 and out.out.count(talk_module.HELP) == 3
    prompts, out = talk(folder, "Hello", "And?", flags=["--system", "Be kind."], answer="stopped")
    assert prompts[1] == written("system: Be kind.", "user: Hello", "assistant: stopped",
                                 "user: And?")


def test_a_long_talk_loses_its_oldest_turns(tmp_path, talk):
    folder = folder_of(tmp_path / "m", "llama3")  # with a context of 256
    prompts, out = talk(folder, *(f"question {i} " + "x" * 20 for i in range(8)),
                        flags=["--max_new_tokens", "40"])
    lengths = [len(tokenizer_of("llama3")(p, add_special_tokens=False)["input_ids"])
               for p in prompts]
    assert max(lengths) <= 256 - 40 and "question 0" not in prompts[-1]
    assert "question 7" in prompts[-1] and "question 6" in prompts[-1]
    assert "is forgotten" in out.err


def test_without_a_chat_template_text_is_continued(tmp_path, talk):
    prompts, out = talk(folder_of(tmp_path / "m", "gpt2"), "Hello", "And?")
    assert prompts == ["Hello", "And?"] and "has no chat template" in out.err


def test_what_is_no_terminal_is_one_prompt(tmp_path, capsys, monkeypatch):
    folder = folder_of(tmp_path / "m", "qwen2")
    flags = ["chat", str(folder), "--temperature", "0", "--max_new_tokens", "9"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\ncat\n"))
    assert generation.main(flags) == 0
    answer = capsys.readouterr().out
    chat = ["generate", *flags[1:], "--chat", "--prompt", "The\ncat"]
    assert generation.main(chat) == 0
    assert capsys.readouterr().out == answer and "猫" not in answer


def test_a_template_that_refuses_a_talk_is_one_line(tmp_path, talk, capsys):
    folder = folder_of(tmp_path / "m", "gemma3")
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}|{% endfor %}")
    prompts, out = talk(folder, "Hello", "/system Be brief.", "So?", "/system", "Bye")
    assert prompts == ["Hello|", "Hello|Hi 猫.|Bye|"]
    assert f"error: {folder}: the chat template refuses it: No system role\n" in out.err
    (folder / "chat_template.jinja").write_text("{{ raise_exception('Nobody') }}")
    assert generation.main(["generate", str(folder), "--chat", "--prompt", "x"]) == 2
    assert "refuses it: Nobody" in capsys.readouterr().err


def test_odd_bytes_on_the_input_are_read(tmp_path, capsys, monkeypatch):
    folder = folder_of(tmp_path / "m", "qwen2")
    flags = ["chat", str(folder), "--max_new_tokens", "3"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\xfeb"), "utf-8"))
    assert generation.main(flags) == 0
    (tmp_path / "p.txt").write_bytes("\ufeffone\u2028still\x0cone\r\ntwo\n".encode())
    flags = ["generate", str(folder), "--temperature", "0", "--max_new_tokens", "1"]
    capsys.readouterr()
    assert generation.main([*flags, "--prompt_file", str(tmp_path / "p.txt")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- 1 of 2\none\u2028still\x0cone") and "\n--- 2 of 2\ntwo" in out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_real_talk_on_a_terminal(tmp_path, family):
    """Ctrl-C stops an answer that would take minutes; the next prompt is answered."""
    folder = folder_of(tmp_path / "m", family)
    if family == "qwen3":
        found = json.loads((folder / "config.json").read_text())
        found |= dict(max_position_embeddings=100_000)
        (folder / "config.json").write_text(json.dumps(found))
    primary, secondary = pty.openpty()
    flags = ["--max_new_tokens", "60000" if family == "qwen3" else "100"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "model.py"), "chat", str(folder), *flags], stdin=secondary,
        stdout=secondary, stderr=secondary, env=environment() | {"TERM": "dumb"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    os.close(secondary)
    seen = b""

    def until(words: bytes, size=0):
        nonlocal seen
        end = time.monotonic() + 120
        while words not in seen or len(seen) < size:
            assert time.monotonic() < end, seen[-500:]
            seen += os.read(primary, 1 << 16)

    until(b"> ")
    seen = b""
    os.write(primary, b"Hello\n")
    until(b"Hello", 30)
    if family == "qwen3":
        process.send_signal(signal.SIGINT)
    until(b"\n> ")
    os.write(primary, b"\x04")
    assert process.wait(60) == 0
    os.close(primary)
