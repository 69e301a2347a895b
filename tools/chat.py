"""Conversations, written by a tokenizer's chat template; the loss counts the replies."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator

from steady.options import ConfigError
from tools.read import without_none

Part = tuple[str, bool]  # text, and whether the loss counts it

PLACE = "\0the reply\0"  # stands in for the content of a message
ROLES = dict(system="system", human="user", user="user", gpt="assistant", assistant="assistant",
             tool="tool")  # of a message with `from` and `value`
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask")  # 0: not in the loss
TYPES = {str: "text", list: "a list", dict: "an object"}
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def chat_documents(tokenizer, record: dict, keys: tuple) -> tuple[list[list[Part]], Counter]:
    """The documents of a conversation, and counts for the summary.

    keys: one of read.RECORDS. A reply is what the template marks as generated, or else begins at
    the end of its generation prompt. If the template rewrites earlier turns as the chat goes on
    (Qwen3's drops their thoughts), each reply ends a document of its own. Empty replies and replies
    of weight 0 count as prompt. Raises ValueError.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(f"these are chats ({keys[0]}): add --tokenizer NAME with a chat template"
                          + ", or --text_field text" * ("text" in record))
    messages = read_messages(record, keys)
    given = dict(tools=expect(list, record.get("tools") or [], "tools") or None)  # to the template
    given |= expect(dict, record.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    weighted = [i for i in replies if messages[i].get("weight", 1)]
    counted = [i for i in weighted if not is_empty(tokenizer, messages[: i + 1], given)]
    whole = at_eos(tokenizer, apply(tokenizer, messages, given))
    parts = marked(tokenizer, messages, given, whole) if counted == replies else None
    if not parts:
        turns = [reply_of(tokenizer, messages, i, given) for i in counted if i]  # 0: a greeting
        parts = one_document(whole, turns, tokenizer)
    documents = [parts] if parts else [
        [(before, False), (at_eos(tokenizer, after)[len(before) :], True)]
        for before, after in turns]
    text = squeeze(whole + "".join(text for parts in documents for text, _ in parts))
    counts = Counter(("not in the text", name) for message in [*messages, given]
                     for name in left_out(message, text))
    counts["empty replies", "not in the loss"] = len(weighted) - len(counted)
    return documents, counts


def is_empty(tokenizer, messages: list[dict], given: dict) -> bool:
    """Whether the last message, a reply, is empty, in content and in everything else."""
    reply = messages[-1]
    if reply["content"].strip() or reply.get("tool_calls"):
        return False
    bare = [*messages[:-1], dict(role="assistant", content=reply["content"])]
    return apply(tokenizer, bare, given) == apply(tokenizer, messages, given)


def left_out(message: dict, text: str) -> Iterator[str]:
    """Names, such as user.name, of values missing in a squeezed text, as they are and in JSON.

    Raises ValueError for questions and calls: templates may rewrite system prompts and thoughts.
    """
    role = message.get("role", "")
    for name, value in leaves(message, role):
        as_json = json.dumps(value, ensure_ascii=False)
        if squeeze(str(value)) in text or squeeze(as_json).strip('"') in text:
            continue
        if name == f"{role}.content" and role not in ("system", "assistant"):
            raise ValueError(f"the chat template leaves out what {role} says")
        if name == f"{role}.tool_calls.function.name":
            raise ValueError("the chat template leaves out tool calls")
        is_switch = isinstance(value, bool) and "." not in name  # of chat_template_kwargs
        if name != f"{role}.role" and (name != f"{role}.weight" or value) and not is_switch:
            yield name


def leaves(x, name: str = "") -> Iterator[tuple[str, object]]:
    """All values inside x, each with the keys on its path as its name."""
    if isinstance(x, dict):
        for key, value in x.items():
            yield from leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(x, list):
        for value in x:
            yield from leaves(value, name)
    elif x is not None:
        yield name, x


def squeeze(text: str) -> str:
    return "".join(text.split())


def expect(kind: type, value, name: str):
    """The value, if it is of this kind. Raises ValueError."""
    if kind is not str and isinstance(value, str):  # JSON, as often in Parquet
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, kind):
        found = TYPES.get(type(value), type(value).__name__)
        raise ValueError(f"{name}: expected {TYPES[kind]}, found {found}")
    return value


def read_messages(record: dict, keys: tuple) -> list[dict]:
    """The messages of a record, in the form that chat templates expect."""
    record = without_none(record)
    messages, system = [], expect(str, record.get("system", ""), "system")
    if keys[0] == "instruction":
        asked = [expect(str, record.get(name, ""), name) for name in ("instruction", "input")]
        messages = [dict(role="user", content="\n\n".join(filter(None, asked))),
                    dict(role="assistant", content=expect(str, record["output"], "output"))]
    else:
        for name in keys:
            for message in without_none(expect(list, record[name], name)):
                message = read_message(expect(dict, message, name))
                messages.append(message | dict(weight=0) if name == "prompt" else message)
    if not messages:
        raise ValueError(f"{keys[0]}: expected a message, found an empty list")
    if system and messages[0]["role"] != "system":
        messages.insert(0, dict(role="system", content=system))
    elif system and messages[0]["content"] != system:
        raise ValueError(f"system: expected one system prompt, found another in {keys[0]}")
    return messages


def read_message(message: dict) -> dict:
    """A message with role and content, arguments of tool calls as objects, and weight 0 for a reply
    that one of FLAGS leaves out of the loss."""
    if "from" in message and "role" not in message:
        role = expect(str, message.pop("from"), "from")
        if role not in ROLES:
            raise ValueError(f"from {role!r}: expected one of {', '.join(ROLES)}")
        message |= dict(role=ROLES[role], content=message.pop("value"))
    role = expect(str, message["role"], "role")
    for name, other in dict(function_call="tool_calls", mask="weight, 0 or 1,").items():
        if name in message:  # outdated; ambiguous
            raise ValueError(f"{role}.{name}: expected {other} in its place")
    if role == "assistant":
        flags = {name: message.pop(name) for name in FLAGS if name in message}
        if odd := [name for name, value in flags.items() if value not in (0, 1)]:
            raise ValueError(f"{role}.{odd[0]}: expected 0 or 1, false or true")
        if not all(flags.values()):
            message["weight"] = 0
    name = f"{role}.tool_calls"
    calls = [expect(dict, call, name) for call in expect(list, message.pop("tool_calls", []), name)]
    for call in calls:
        function = call["function"] = expect(dict, call["function"], f"{name}.function")
        arguments = function.get("arguments") or {}
        function["arguments"] = expect(dict, arguments, f"{name}.function.arguments")
    if calls:  # to many templates an empty list is a call
        message = dict(content="") | message | dict(tool_calls=calls)
    name = f"{role}.content"
    if isinstance(message["content"], list):  # a list of parts; many templates would drop them
        parts = [expect(dict, part, name) for part in message["content"]]
        if odd := [part for part in parts if {"type": "text"} | part != dict(
                type="text", text=part["text"])]:
            raise ValueError(f"{name}: expected parts of type text, found {', '.join(odd[0])}")
        message["content"] = "".join(expect(str, part["text"], name) for part in parts)
    expect(str, message["content"], name)
    return message


def apply(tokenizer, messages: list[dict], given: dict, **options) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **given, **options)
    except (TemplateError, ArithmeticError, TypeError) as e:
        raise ValueError(f"the chat template refuses it: {e}") from None


def end_of_turn(tokenizer) -> int | None:
    """The special token written after a reply; None if the template writes other text."""
    try:
        text = apply(tokenizer, [dict(role="user", content="a"),
                                 dict(role="assistant", content=PLACE)], {})
    except (ValueError, LookupError):  # no template, or one of its own kind
        return None
    ids = tokenizer(text.partition(PLACE)[2].strip(), add_special_tokens=False)["input_ids"]
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return ids[0] if token and token.special else None


def marked(tokenizer, messages, given, whole: str) -> list[Part] | None:
    """Parts by the {% generation %} marks (transformers' mask of tokens may run on), or None."""
    from transformers.utils.chat_template_utils import render_jinja_template
    template = given.get("chat_template") or tokenizer.get_chat_template(tools=given["tools"])
    if not MARKED.search(template):
        return None
    _, [spans] = render_jinja_template(**tokenizer.special_tokens_map | given | dict(
        conversations=[messages], chat_template=template, return_assistant_tokens_mask=True))
    encoded, parts, done = tokenizer(whole, add_special_tokens=False), [], 0
    for begin, end in ((begin, end) for begin, end in spans if begin < end):
        if (token := encoded.char_to_token(begin)) is not None:  # it may begin in the prompt
            begin = max(done, encoded.token_to_chars(token).start)
        parts += [(whole[done:begin], False), (whole[begin:end], True)]
        done = end
    return [*parts, (whole[done:], False)] if parts else None


def reply_of(tokenizer, messages: list[dict], i: int, given: dict) -> tuple[str, str]:
    """(the prompt of reply i, prompt and reply). Raises ValueError."""
    before = apply(tokenizer, messages[:i], given, add_generation_prompt=True)
    after = apply(tokenizer, messages[: i + 1], given)
    if after.startswith(before):
        return before, after
    # The template writes the prompt differently once a reply follows. So append the reply to the
    # prompt, after the last words common to both: all that is before it, or else the question.
    content = messages[i]["content"]
    placed = {k: v for k, v in messages[i].items() if k != "tool_calls"} | dict(content=PLACE)
    head, _, tail = apply(tokenizer, [*messages[:i], placed], given).partition(PLACE)
    reply = after.removeprefix(head)
    if content.strip() not in reply and "tool_calls" not in messages[i]:
        reply = content + tail  # DeepSeek's template drops the thought
    asked = not before.startswith(head) and messages[i - 1]["content"].strip() or PLACE
    begun, written = (text.rpartition(asked)[2] for text in (before, head))
    if begun.startswith(written) and not (written + reply).startswith(begun):
        # DeepSeek's template begins a thought that this reply lacks
        before, begun = before.removesuffix(begun) + written, written
    if not after.startswith(head) or not (written + reply).startswith(begun):
        raise ValueError("the chat template writes earlier turns differently if a reply follows")
    return before, before + (written + reply)[len(begun) :]


def one_document(whole: str, turns: list[tuple[str, str]], tokenizer) -> list[Part] | None:
    """The whole conversation; None if the template rewrites any turn later."""
    parts, done = [], 0
    for before, after in turns:
        # the last turn may end so; Phi-3's template writes an end-of-text there
        ends = after, at_eos(tokenizer, after), after.removesuffix(tokenizer.eos_token)
        after = next(filter(whole.startswith, ends), "")
        if not after.startswith(before):
            return None
        parts += [(whole[done : len(before)], False), (after[len(before) :], True)]
        done = len(after)
    return [*parts, (whole[done:], False)]


def at_eos(tokenizer, text: str) -> str:
    """The text, without white space after a final end-of-text."""
    return text.rstrip() if text.rstrip().endswith(tokenizer.eos_token) else text
