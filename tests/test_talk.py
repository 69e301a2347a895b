"""`python model.py chat`, and `generate` with several prompts."""

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
from test_huggingface import small
from test_prepare import read, texts, write_jsonl
from tokenizers import processors
from transformers import AutoModelForCausalLM

from steady.tokens.tokenizers import byte_tokenizer
from tools import generate as generation
from tools import prepare


def folder_of(path, family: str, std=0.1, **generation_config):
    """A random model with the tokenizer of a family, or GPT-2 with that of bytes.

    std: of its weights, None for those that it would begin with.
    """
    torch.manual_seed(0)
    tokenizer = byte_tokenizer() if family == "gpt2" else tokenizer_of(family)
    model = AutoModelForCausalLM.from_config(
        small("gpt2") if family == "gpt2" else config_of(family, tokenizer))
    for p in model.parameters() if std else ():
        torch.nn.init.normal_(p, std=std)
    for name, value in generation_config.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])  # ours, and through transformers
def test_several_prompts_are_answered_as_alone(tmp_path, tool, family):
    folder = folder_of(tmp_path / "m", family)
    prompts = ["The cat", "", "1 + 2 = 3, and so on", "naïve 猫\u2028still one"]
    flags = [generation.main, "generate", folder, "--temperature", 0, "--max_new_tokens", 12]
    alone = [tool(*flags, "--prompt", prompt).out for prompt in prompts]
    assert re.split(r"--- \d of 4\n", tool(*flags, "--prompt", *prompts).out)[1:] == alone


def test_a_prompt_is_what_training_begins_with(tmp_path, monkeypatch):
    """Of a tokenizer that puts tokens around a text, which its chat template does not write."""
    folder = folder_of(tmp_path / "m", "qwen3")
    tokenizer = generation.tokenizers.load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<t>"]})
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    begin, again = tokenizer.convert_tokens_to_ids(["<s>", "<t>"])
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <t> $A <|im_end|>", pair="$A $B",
        special_tokens=[("<s>", begin), ("<t>", again), ("<|im_end|>", end)])
    tokenizer.save_pretrained(folder)
    assert generation.tokenizers.load_tokenizer(str(folder))("")["input_ids"] == [begin, again, end]
    chat = [dict(role=role, content="The cat") for role in ("user", "assistant")]
    records = dict(text="The cat"), dict(messages=chat), dict(prompt="The", completion=" cat")
    write_jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "a.txt").write_text("\n".join(texts(300)))  # which is cut in two
    for name, share in (("a.jsonl", 0), ("a.txt", 0.3)):
        assert prepare.main([str(tmp_path / name), f"--out={tmp_path / name}-o", "--workers=1",
                             f"--val_fraction={share}", f"--tokenizer={folder}"]) == 0
    (text, _), (said, _), (pair, mask) = read(tmp_path / "a.jsonl-o")
    for split in ("train", "val"):
        ((ids, _),) = read(tmp_path / "a.txt-o", split)
        assert ids[:2] == [begin, again] and ids[-1] == end and not {begin, end} & {*ids[2:-1]}
    prompts = []
    monkeypatch.setattr(generation, "generate", lambda _, ids, *__, **___: prompts.extend(
        ids.tolist()))
    for flags in (["The cat"], ["The cat", "--chat"], ["The"], ["<s><t>The"]):
        assert generation.main(["generate", str(folder), "--prompt", *flags]) == 0
    the, cat = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("The", " cat"))
    assert text == pair == [begin, again, *the, *cat, end] == [*prompts[0], end]
    assert mask == [0] * len([begin, again, *the]) + [1] * len([*cat, end])
    assert said[: len(prompts[1])] == prompts[1] and begin not in said
    assert prompts[2] == prompts[3] == [begin, again, *the]


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
    for odd in ([], dict(top_k=-1), dict(temperature=float("nan")), dict(top_k="x"),
                dict(top_p=[1]), dict(top_k=1e999)):
        path.write_text(json.dumps(odd))
        assert generation.usual_sampling(folder) == {}
    path.write_text(json.dumps(dict(top_k=5.0, temperature=1)))
    assert generation.usual_sampling(folder) == dict(temperature=1.0, top_k=5)
    assert type(generation.usual_sampling(folder)["top_k"]) is int  # as torch.topk wants it


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def talk(monkeypatch, tool):
    """talk(folder, *lines, flags) → prompts that the model had, what was printed."""

    def talk(folder, *lines, flags=(), answer="Hi 猫."):
        prompts, rest = [], iter(lines)
        tokenizer = generation.tokenizers.load_tokenizer(str(folder))
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
        return prompts, tool(generation.main, "chat", folder, *flags)

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
        written("user: Last")]
    assert out.out.count("Hi 猫.\n") == 5 and out.out.count(generation.HELP) == 3
    prompts, out = talk(folder, "Hello", "And?", flags=["--system", "Be kind."], answer="stopped")
    assert prompts[1] == written("system: Be kind.", "user: Hello", "assistant: stopped",
                                 "user: And?")
    prompts, _ = talk(folder, os.fsdecode(b"caf\xe9"), flags=["--system", os.fsdecode(b"\xff!")])
    assert prompts == [written("system: \ufffd!", "user: caf\ufffd")]  # of another encoding


def test_a_long_talk_loses_its_oldest_turns(tmp_path, talk):
    folder = folder_of(tmp_path / "m", "llama3")  # with a context of 256
    prompts, out = talk(folder, *(f"question {i} " + "x" * 20 for i in range(8)),
                        flags=["--max_new_tokens", "40"])
    lengths = [len(tokenizer_of("llama3")(p, add_special_tokens=False)["input_ids"])
               for p in prompts]
    assert max(lengths) <= 256 - 40 and "question 0" not in prompts[-1]
    assert "question 7" in prompts[-1] and "question 6" in prompts[-1]
    assert "dropped the oldest question" in out.err


def test_chat_without_a_chat_template_is_refused(tmp_path, tool):
    told = tool(generation.main, "chat", folder_of(tmp_path / "m", "gpt2"), expect=2).err
    assert "has no chat template; generate" in told
    assert "t: )" not in generation.make_parser(generation.ChatOptions, "", "", "").format_help()


def test_what_is_no_terminal_is_one_prompt(tmp_path, tool, monkeypatch):
    flags = [folder_of(tmp_path / "m", "qwen2"), "--temperature", 0, "--max_new_tokens", 9]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The\xff\ncat\n"), "utf-8"))
    answer = tool(generation.main, "chat", *flags).out
    flags += ["--chat", "--prompt", "The\ufffd\ncat"]
    assert tool(generation.main, "generate", *flags).out == answer and "猫" not in answer


def test_a_template_that_refuses_a_talk_is_one_line(tmp_path, talk, tool):
    folder = folder_of(tmp_path / "m", "gemma3")
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}|{% endfor %}")
    prompts, out = talk(folder, "Hello", "/system Be brief.", "So?", "/system", "Bye")
    assert prompts == ["Hello|", "Hello|Hi 猫.|Bye|"]
    assert f"error: {folder}: the chat template refuses it: No system role\n" in out.err
    (folder / "chat_template.jinja").write_text("{{ raise_exception('Nobody') }}")
    told = tool(generation.main, "generate", folder, "--chat", "--prompt", "x", expect=2).err
    assert "refuses it: Nobody" in told


@pytest.mark.slow
def test_a_real_talk_on_a_terminal(tmp_path):
    """Ctrl-C stops an answer that would take minutes; the next prompt is answered."""
    folder = folder_of(tmp_path / "m", "qwen3")
    found = json.loads((folder / "config.json").read_text())
    found |= dict(max_position_embeddings=100_000)
    (folder / "config.json").write_text(json.dumps(found))
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "model.py"), "chat", str(folder), "--max_new_tokens", "60000"],
        stdin=secondary, stdout=secondary, stderr=secondary, env=environment() | {"TERM": "dumb"},
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
    process.send_signal(signal.SIGINT)
    until(b"\n> ")
    os.write(primary, b"\x04")
    assert process.wait(60) == 0
    os.close(primary)
