"""Conversations: every common form of record gives the same tokens, and only replies count."""

# ruff: noqa: F401, F811 -- fixtures of another file

import itertools
import json
import re
from itertools import groupby
from pathlib import Path

import pytest
from families import CALL, CHATS, FAMILIES, LLAMA3, chat, make_tokenizer, tokenizer_of
from test_prepare import command, made, read, write_jsonl
from tokenizers.pre_tokenizers import WhitespaceSplit

from steady.options import ConfigError
from tools import prepare
from tools.chat import FLAGS
from tools.prepare import Encoder

SYSTEM, TALK = "Be brief.", chat("user: Hello", "assistant: Hi.", "user: And?", "assistant: Bye.")
SAID = {"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}
THOUGHTLESS = (  # as DeepSeek's: a prompt begins a thought, and replies are written without theirs
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<T>' + m.content }}{% else %}{{ '<A>' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}"
    "{% endfor %}{{ m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{{ '<A><think>\n' if add_generation_prompt }}")
OWN = dict(deepseek=THOUGHTLESS, marked=(
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}"
    "{% generation %}{{ m.content + '\n' }}{% endgeneration %}{% endif %}{% endfor %}"),
    calls=("{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}"
           "{{ '<A>' }}{% generation %}{{ m.content }}{% endgeneration %}"
           "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
           "{% endif %}{% endfor %}{{ '<A>' if add_generation_prompt }}"))


def documents(tokenizer, *records, as_json=False) -> list[tuple[list[int], list[int]]]:
    """(ids, mask) of each document that prepare makes of the records."""
    encoder = Encoder(None, prepare.Options(val_fraction=0))
    encoder.tokenizer, encoder.end = tokenizer, tokenizer.eos_token_id
    data = [json.dumps(record).encode() if as_json else record for record in records]
    found = encoder[[("a", i, record) for i, record in enumerate(data, 1)]]
    if isinstance(found, ConfigError):
        raise found
    ids, ends, mask, _ = found[0]["train"]
    mask = [1] * len(ids) if mask is None else mask.tolist()
    return [(ids[a:b].tolist(), mask[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def counts(tokenizer, *records) -> dict:
    encoder = Encoder(None, prepare.Options(val_fraction=0))
    encoder.tokenizer = tokenizer
    return +encoder.documents([("a", i, record) for i, record in enumerate(records, 1)])[1]


def runs(document) -> list[list[int]]:
    """The stretches of counted tokens."""
    pairs = groupby(zip(*document, strict=True), key=lambda pair: pair[1])
    return [[i for i, _ in pair] for counted, pair in pairs if counted]


def shown(tokenizer, *records) -> list[str]:
    """The text of each document, with what counts in brackets."""
    found = []
    for document in documents(tokenizer, *records):
        pairs = groupby(zip(*document, strict=True), key=lambda pair: pair[1])
        texts = [(tokenizer.decode([i for i, _ in pair]), counted) for counted, pair in pairs]
        found.append("".join(f"[{text}]" if counted else text for text, counted in texts))
    return found


SYSTEM_TALK = [dict(role="system", content=SYSTEM), *TALK[:2]]
SAME = {
    "messages": dict(messages=SYSTEM_TALK),
    "with system": dict(messages=TALK[:2], system=SYSTEM),
    "parts of text": dict(messages=[SYSTEM_TALK[0], dict(role="user", content=[
        dict(type="text", text="Hel"), dict(type="text", text="lo")]), TALK[1]]),
    "prompt, completion": dict(prompt=SYSTEM_TALK[:2], completion=TALK[1:2]),
    "instruction": dict(instruction="Hello", input="", output="Hi.", system=SYSTEM),
    "conversations": dict(conversations=[{"from": "system", "value": SYSTEM}, *SAID]),
    "conversations, role": dict(conversations=SYSTEM_TALK),
    "columns of others": dict(messages=[dict(m, tool_calls=None if m is TALK[1] else [])
                                        for m in SYSTEM_TALK], tools=None)}


@pytest.mark.parametrize("form", SAME)
def test_every_form_of_record_gives_the_same_tokens(form):
    tokenizer = tokenizer_of("qwen2")
    expected = ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
                "<|im_start|>assistant\n[Hi.<|im_end|>]"]
    assert shown(tokenizer, SAME[form]) == expected
    assert documents(tokenizer, SAME[form], as_json=True) == documents(tokenizer, SAME["messages"])


def test_settings_beside_a_chat_go_to_the_template():
    talk = dict(messages=TALK[:2], chat_template_kwargs=dict(enable_thinking=False))
    for family, words in (("qwen3", "<think>\n\n</think>\n\n[Hi."), ("smollm3", ": /no_think\n")):
        assert words in shown(tokenizer_of(family), talk)[0]


def test_replies_in_a_prompt_do_not_count():
    for family in ("qwen2", "smollm3"):  # without and with marks in the template
        tokenizer = tokenizer_of(family)
        one = dict(prompt=TALK[:3], completion=TALK[3:])
        (ids, mask), (all_ids, all_mask) = documents(tokenizer, one, dict(messages=TALK))
        assert ids == all_ids and len(runs((ids, mask))) == 1 and len(runs((ids, all_mask))) == 2
        assert tokenizer.decode(runs((ids, mask))[0]) == "Bye.<|im_end|>"
    (text,) = documents(tokenizer, dict(prompt="Hello", completion=" there"))
    assert runs(text) == [tokenizer(" there" + tokenizer.eos_token)["input_ids"]]  # stays plain


def test_replies_of_weight_0_do_not_count():
    """OpenAI's mark of a message that fine-tuning leaves out."""
    for family in ("qwen2", "smollm3", "mistral"):  # also with marks; a document for each reply
        tokenizer = tokenizer_of(family)
        first, last = ([*TALK[:1], dict(TALK[1], weight=a), TALK[2], dict(TALK[3], weight=b)]
                       for a, b in ((1, 0), (0, 1)))
        system = [dict(role="system", content=SYSTEM)] * (family == "mistral")
        texts = [[tokenizer.decode(run).removeprefix("<|im_start|>assistant\n").strip()
                  for document in documents(tokenizer, dict(messages=system + messages))
                  for run in runs(document)] for messages in (TALK, first, last)]
        assert texts[1] + texts[2] == texts[0] and len(texts[0]) == 2  # marks have the header, too
        none = dict(messages=[dict(m, weight=0) for m in TALK])
        assert [runs(document) for document in documents(tokenizer, none)] == [[]]
        for flag in FLAGS:
            flagged = dict(messages=[*TALK[:1], {**TALK[1], flag: False}, TALK[2],
                                     {**TALK[3], flag: True}])
            assert documents(tokenizer, flagged) == documents(tokenizer, dict(messages=last))
        everything = dict(messages=[dict(m, weight=None if m is TALK[0] else 1.0) for m in TALK])
        assert documents(tokenizer, everything) == documents(tokenizer, dict(messages=TALK))


def test_tool_calls_come_in_several_forms():
    tokenizer = tokenizer_of("qwen3")
    as_text = json.loads(json.dumps(CALL))
    as_text["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    tools = [dict(function=dict(name="add", description="adds", parameters=dict(default=None)))]
    forms = [
        dict(messages=CHATS["a tool"], tools=tools),
        dict(messages=[dict(m, tool_calls=[as_text], content=None) if "tool_calls" in m else m
                       for m in CHATS["a tool"]], tools=json.dumps(tools))]
    found = [documents(tokenizer, form) for form in forms]
    assert found[0] == found[1] and len(found[0]) == 2  # a document for each reply
    first = shown(tokenizer, forms[0])[0]
    assert '"description": "adds"' in first and first.endswith(
        '[<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
        "</tool_call><|im_end|>]")
    for nulls in ('{"a": null}', dict(a=None)):  # null where it was written, as OpenAI does
        as_text["function"]["arguments"] = nulls
        first = shown(tokenizer, forms[1])[0]
        assert '"parameters": {"default": null}' in first and '"arguments": {"a": null}' in first


@pytest.mark.parametrize("family, messages, expected", [
    # a template that drops earlier thoughts, and one that writes empty ones
    ("deepseek", CHATS["two thoughts"], [
        "<U>2+2?<A><think>\n[It is 4.\n</think>\n\nFour.</s>]",
        "<U>2+2?<A>\n\nFour.</s><U>3?<A><think>\n[Hm.\n</think>\n\nThree.</s>]"]),
    ("deepseek", TALK, ["<U>Hello<A>[Hi.</s>]<U>And?<A>[Bye.</s>]"]),
    ("qwen3", TALK[:2], ["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
                         "[<think>\n\n</think>\n\nHi.<|im_end|>]"]),
    # marks, and a tokenizer without a token for the line end after a reply
    ("marked", TALK, ["<U>Hello[Hi.]<U>And?[Bye.</s>]"]),
    # marks around nothing
    ("calls", [TALK[0], dict(role="assistant", content="", tool_calls=[dict(
        function=dict(name="f"))])], ["<U>Hello<A>[f</s>]"]),
    # what answers nobody, and what nobody answers
    ("deepseek", chat("assistant: Hi.", "user: ", "assistant: A"), ["<A>Hi.</s><U><A>[A</s>]"]),
    ("deepseek", chat("user: >", "assistant: Hi.", "user: And?"), ["<U>><A>[Hi.</s>]<U>And?</s>"]),
    # a system prompt that a template writes only at the end
    ("mistral", CHATS["two turns"], [
        "<s>[INST] Be brief.\n\nHello[/INST][ Hi.</s>]",
        "<s>[INST] Hello[/INST] Hi.</s>[INST] Be brief.\n\nAnd?[/INST][ Bye\n\nnow.</s>]"])])
def test_what_counts_where_templates_write_turns_anew(family, messages, expected):
    own = make_tokenizer(OWN.get(family), ["<U>", "<A>", "<T>"], None, "</s>")
    tokenizer = own if family in OWN else tokenizer_of(family)
    if family == "marked":
        tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    assert shown(tokenizer, dict(messages=messages)) == expected
    if family in OWN:  # a template beside the messages, as well
        kwargs, tokenizer.chat_template = dict(chat_template=OWN[family]), OWN["marked"]
        assert shown(tokenizer, dict(messages=messages, chat_template_kwargs=kwargs)) == expected


@pytest.mark.parametrize("record, words", [
    (dict(messages=CHATS["a tool"]), "leaves out tool calls"),
    (dict(conversations=[{"from": "robot", "value": "x"}]), "from 'robot': expected one of system"),
    (dict(messages=[dict(role="user", content=[dict(type="image", url="x")])]), "no 'text'"),
    (dict(messages=[]), "messages: expected a message, found an empty list"),
    (dict(messages=[{"content": "a"}]), "no 'role'"),
    (dict(question="a", answer="b"), "has question, answer; expected text (see --text_field), or "
     "prompt and completion, messages"),
    (dict(messages=TALK, tools={"name": "clock"}), "tools: expected a list, found an object"),
    (dict(conversations=None, system="x"), "has conversations: null, system; expected"),
    (dict(messages=[dict(role="user", content=None)]), "no 'content'; --skip_bad"),
    (dict(instruction="a", input=float("nan"), output="b"), "input: expected text, found float"),
    (dict(prompt=TALK[:1], completion="Hi."), "completion: expected a list, found text"),
    *((record | dict(history=[["c", "d"]]), "history: expected all turns in one list of messages")
      for record in (dict(instruction="a", output="b"), dict(prompt="a", completion="b"))),
    (dict(prompt="a", completion="b", label=False), "label false: a rejected completion"),
    (dict(conversations=TALK, label=0), "label false: a rejected completion"),
    (TALK, "record: expected an object, found a list"),
    (dict(messages=TALK, chat_template_kwargs=[1]), "chat_template_kwargs: expected an object"),
    (dict(messages=SYSTEM_TALK, system="x"), "system: expected one system prompt"),
    (dict(messages=[dict(role="user", content=[dict(type="thought", text="a")])]),
     "user.content: expected parts of type text, found type, text"),
    (dict(messages=[dict(role="assistant", tool_calls=[dict(function=dict(
        name="add", arguments="1, 2"))])]), "arguments: expected an object, found text"),
    (dict(messages=[*TALK[:1], dict(TALK[1], function_call=CALL["function"])]),
     "assistant.function_call: expected tool_calls in its place"),
    (dict(messages=[*TALK[:1], dict(TALK[1], mask=1)]), "assistant.mask: expected weight"),
    (dict(messages=[dict(TALK[1], weight=0.5)]), "assistant.weight: expected 0 or 1"),
    (dict(messages=[dict(TALK[0], content="\ud83d")]), "half of a character")])
def test_what_cannot_be_written_is_refused(record, words):
    for family in ("llama3", "smollm3"):  # without and with marks in the template
        with pytest.raises(ConfigError, match=re.escape(words)):
            documents(tokenizer_of(family), record)


@pytest.mark.parametrize("template, words", [
    ("{% for m in messages %}{{ m.content + ('?' if loop.last else '!') }}{% endfor %}"
     "{{ '<A>' if add_generation_prompt }}", "writes earlier turns different"),
    ("{{ 1 / 0 }}", "refuses it: division by zero"),
    ("{{ 1 + '1' }}", "refuses it: unsupported operand")])
def test_a_template_that_cannot_be_used_is_refused(template, words):
    with pytest.raises(ConfigError, match=f"a:1: the chat template {words}"):
        documents(make_tokenizer(template, ["<A>"], None, "</s>"), dict(messages=TALK))


@pytest.fixture
def made_of(tmp_path, made):
    """made_of(family, records, *flags, expect=0) → what `python data.py` printed of these chats."""
    def made_of(family, records, *flags, expect=0):
        tokenizer_of(family).save_pretrained(tmp_path / "t")
        source = write_jsonl(tmp_path / "a.jsonl", records)
        return made(source, "--tokenizer", tmp_path / "t", "--workers", 1, *flags, expect=expect)

    return made_of


def test_the_summary_counts_chats_that_teach_nothing(tmp_path, made_of):
    asked, answered = dict(messages=chat("user: Hello")), dict(messages=TALK[:2])
    told = made_of("qwen3", [asked, answered, dict(messages=CHATS["two thoughts"], id=2), asked])
    assert "documents        5 + 0" in told and "ignored keys     id (1)\n" in told
    assert "without a reply  train (2)\n" in told
    told = made_of("gemma3", [answered, dict(messages=TALK[1:]), dict(messages=[{}])], "--skip_bad")
    assert "no 'role' (1)" in told and "documents        1 +" in told
    assert "the chat template refuses it: Conversation roles must alternate" in told
    before = (tmp_path / "o/train.bin").read_bytes()
    assert "no document to train on has a reply" in made_of("qwen2", [asked] * 3, expect=2)
    assert (tmp_path / "o/train.bin").read_bytes() == before


def test_what_a_template_leaves_out_is_counted_by_name(made_of):
    result = dict(role="tool", content="3", tool_call_id="c1")
    told = made_of("qwen3", [
        dict(messages=[dict(TALK[0], weight=1), dict(TALK[1], thoughts="Greet.", name="b")] * 2),
        dict(messages=[TALK[0], dict(role="assistant", tool_calls=[dict(CALL, id="c1")]), result])])
    found = re.search("not in the text  (.*)", told)[1].split(", ")
    assert found == ["user.weight (2)", "assistant.thoughts (2)", "assistant.name (2)",
                     "assistant.tool_calls.type (1)", "assistant.tool_calls.id (1)",
                     "tool.tool_call_id (1)"]
    tools = [dict(type="function", function=dict(name="clock", description="tells the hour"))]
    kwargs = dict(enable_thinking=False, xml_tools=["clock"], none=None)
    told = made_of("gemma3", [dict(messages=TALK, tools=tools, chat_template_kwargs=kwargs)])
    assert "tools.function.name (1), tools.function.description (1), xml_tools (1)\n" in told
    unsaid = make_tokenizer(THOUGHTLESS.replace("{% else %}", "{% elif m.role != 'system' %}"),
                            ["<U>", "<A>", "<T>"], None, "</s>")
    assert counts(unsaid, dict(messages=TALK, system=SYSTEM)) == {
        ("not in the text", "system.content"): 1}
    thought = dict(messages=[*TALK[:1], dict(TALK[1], reasoning_content="c\nd")] * 2)
    rewritten = dict(messages=chat("user:  a\n b ", "assistant: <think>c</think>\n\n d"))
    assert not counts(tokenizer_of("qwen3"), thought, rewritten)


def test_an_empty_reply_is_not_learned(made_of):
    for family in ("qwen3", "smollm3"):  # without and with marks in the template
        tokenizer, empty = tokenizer_of(family), dict(role="assistant", content=" ")
        for last in (empty, dict(empty, id="a1")):  # no template writes an id
            (found,) = documents(tokenizer, dict(messages=[*TALK[:2], TALK[2], last]))
            (reply,) = map(tokenizer.decode, runs(found))
            assert reply.strip().endswith("Hi.<|im_end|>")
    thought = dict(messages=[*TALK[:1], dict(empty, reasoning_content="Hm.")])
    assert len(runs(*documents(tokenizer_of("qwen3"), thought))) == 1
    told = made_of("qwen3", [dict(instruction="Hello", output=text, history=h) for text, h in (
        ("", []), ("Hi.", "[]"), ("", float("nan")), ("Hi.", ""), ("Hi.", "edited 2024"))])
    assert "empty replies    not in the loss (2)\nwithout a reply  train (2)" in told


def test_a_chat_goes_before_the_text_beside_it(tmp_path, made_of):
    records = [dict(TALK=1, messages=TALK[:2], text="Hello Hi."), dict(text="Hi.", messages=None)]
    assert "ignored keys     TALK (1), text (1), messages (1)" in made_of("qwen2", records)
    chat, text = read(tmp_path / "o")
    assert len(runs(chat)) == 1 and 0 in chat[1] and all(text[1])
    assert "ignored keys     messages (2)" in made_of("qwen2", records, "--text_field", "text")
    assert all(all(mask) for _, mask in read(tmp_path / "o"))


def test_documents_of_one_conversation_are_in_one_split(tmp_path, made_of):
    records = [dict(messages=[dict(m, content=f"{i} {m['content']}") for m in TALK[:2]] * 2)
               for i in range(100, 140)]
    made_of("mistral", [dict(system=SYSTEM, **record) for record in records], "--val_fraction", 0.5)
    tokenizer = tokenizer_of("mistral")
    numbers = [{re.search(r"\d+", tokenizer.decode(ids)).group() for ids, _ in documents}
               for documents in (read(tmp_path / "o", split) for split in ("train", "val"))]
    assert len(numbers[0]) + len(numbers[1]) == 40 and all(numbers)


@pytest.mark.parametrize("role", ["developer", "function", "model"])
def test_a_role_that_a_template_passes_over_is_refused(role):
    record = dict(messages=[*TALK[:2], said := dict(role=role, content=" 7 "), *TALK[2:]])
    with pytest.raises(ConfigError, match=f"leaves out what {role} says"):
        documents(tokenizer_of("qwen2"), record)
    assert documents(tokenizer_of("llama3"), record)
    as_json = LLAMA3.replace("m.content | trim", "(m.content | tojson)")
    said["content"] = '{"a": "猫"}'
    assert documents(make_tokenizer(as_json, *FAMILIES["llama3"][1:4]), record)


def test_what_counts_is_shown(tmp_path, run, command, made_of):
    made_of("qwen2", [dict(messages=CHATS[name]) for name in ("one turn", "two turns")] * 5)
    shown = command("show", tmp_path / "o", 2)
    reply = "<|im_start|>assistant\n⟦Hi.<|im_end|>\n⟧<|im_start|>user"
    assert shown.count("--- document ") == 2 and reply in shown
    assert command("show", tmp_path / "o", 99).count("--- document ") == 10
    run("--data", tmp_path / "o", "--out_dir", "r", "--max_steps", 2, "--seq_len", 256)
    assert "assistant\n⟦Hi.<|im_end|>\n⟧<|im_start|>user" in (
        command("show", "r", 1) + command("show", "r", 2))


# What TRL's training templates count although it is part of the prompt of an answer.
HEADERS = {"qwen2_5": ["\n"], "deepseekv3": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
           "deepseek_r1_distill": ["<｜Assistant｜><think>\n", "<｜Assistant｜>"]}
DEEPSEEK = (["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"], "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>")
THEIRS = {"deepseekv3": DEEPSEEK, "deepseek_r1_distill": DEEPSEEK} | {
    name: FAMILIES[family][1:4] for name, family in dict(
        qwen2_5="qwen2", qwen3="qwen3", qwen3_instruct_2507="qwen3", llama3="llama3",
        gemma="gemma3", gemma3="gemma3", phi3="phi3", phi3_5="phi3").items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_tokens_that_count_are_those_of_trl(name):
    """With TRL's training template all tokens and masks are equal; with the original, what counts.

    Except for white space and an end-of-text after the last turn, and for HEADERS.
    """
    templates = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    original = (templates / f"{name}.jinja").read_text()
    tokenizer = make_tokenizer(original, *THEIRS[name])
    training = (templates / f"{name}_training.jinja").read_text()
    headers = [tokenizer(h, add_special_tokens=False)["input_ids"] for h in HEADERS.get(name, [])]
    compared = 0

    def same(ours: list[int], theirs: list[int]) -> bool:
        end = len(theirs) - (tokenizer.decode(theirs[-1:]) == "\n")
        rest = {tokenizer.decode([i]) for i in ours[end:]}
        return ours[:end] == theirs[:end] and rest <= {"\n", tokenizer.eos_token}

    def without_header(ids: list[int]) -> list[int]:
        return next((ids[len(h) :] for h in headers if ids[: len(h)] == h), ids)

    for what, messages in CHATS.items():
        try:
            found = tokenizer.apply_chat_template(
                messages, chat_template=training, return_dict=True,
                return_assistant_tokens_mask=True)
        except Exception:  # a template that refuses tools or system prompts
            continue
        theirs = list(found["input_ids"]), list(found["assistant_masks"])
        tokenizer.chat_template = training  # as SFTTrainer does
        try:
            (ours,) = documents(tokenizer, dict(messages=messages))
        except ConfigError as e:
            assert "leaves out tool calls" in str(e)  # TRL drops them
            continue
        assert same(ours[0], theirs[0]), what
        assert all(a == b for a, b in zip(ours[1], theirs[1], strict=False)), what
        tokenizer.chat_template = original
        if what == "white space" or name == "deepseekv3" and "thought" in what:
            continue  # a token across the border; thoughts, which TRL's template drops
        ours = [run for d in documents(tokenizer, dict(messages=messages)) for run in runs(d)]
        pairs = zip(ours, map(without_header, runs(theirs)), strict=True)
        assert all(itertools.starmap(same, pairs)), what
        compared += 1
    assert compared >= 4
