"""Conversations as a tokenizer's chat template writes them; what assistants say counts."""

import json
import re
from functools import partial
from itertools import groupby

from steady.options import ConfigError

Part = tuple[str, bool]  # text, and whether the loss counts it

PLACE = "\0the reply\0"  # stands where a template puts the content of a message
ROLES = dict(
    system="system", human="user", user="user", gpt="assistant", assistant="assistant",
    function_call="assistant", tool="tool", observation="tool", function_response="tool",
)  # of a message with `from` and `value`
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def chat_documents(tokenizer, record: dict, keys: tuple) -> tuple[list[list[Part]], str]:
    """The documents of a conversation, and how its replies were told from its prompts.

    keys: those that hold it, one of read.RECORDS. Replies are what the template marks as generated
    ("marks"). Where it has no marks, a reply begins where the template, asked for the next one,
    would leave off (""); and where it writes earlier turns differently when more follow, as
    Qwen3's drops what was thought, each reply ends a document of its own ("turns").
    Raises ValueError where none of them can be done.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(f"these are chats ({keys[0]}): add --tokenizer NAME with a chat template")
    messages, given = read_messages(record, keys)
    tools = read_tools(record.get("tools"))
    try:
        documents, how = write_documents(tokenizer, messages, given, tools)
    except TypeError:  # DeepSeek's template takes the arguments of a call as JSON
        dump = partial(json.dumps, ensure_ascii=False)
        messages = [m | dict(tool_calls=with_arguments(m["tool_calls"], dump))
                    if m.get("tool_calls") else m for m in messages]
        documents, how = write_documents(tokenizer, messages, given, tools)
    return [end_at_eos(parts, tokenizer.eos_token) for parts in documents], how


def write_documents(tokenizer, messages: list[dict], given: int, tools: list | None):
    """As chat_documents; replies among the first `given` messages, or of weight 0, are prompt."""
    theirs = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    counted = [i for i in theirs if i >= given and messages[i].get("weight", 1)]
    replies = [i for i in counted if i > 0]  # a greeting answers nobody
    whole = apply(tokenizer, messages, tools)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if any(call["function"]["name"] not in whole for call in calls):
        raise ValueError("the chat template leaves out tool calls")
    for message in messages:
        said = message["content"].strip()
        as_json = json.dumps(said, ensure_ascii=False)[1:-1]  # as some write results of tools
        if (message["role"] not in ("system", "assistant")
                and said not in whole and as_json not in whole):
            raise ValueError(f"the chat template leaves out what {message['role']} says")
    if counted == theirs:
        documents = marked(tokenizer, messages, tools, whole)
        if documents:
            return documents, "marks"
    turns = [reply_of(tokenizer, messages, i, tools) for i in replies]
    documents = one_document(whole, turns, tokenizer.eos_token)
    if documents:
        return documents, ""
    return [[(before, False), (after[len(before) :], True)] for before, after in turns], "turns"


def reply_of(tokenizer, messages: list[dict], i: int, tools: list | None) -> tuple[str, str]:
    """The conversation up to reply i: its prompt, and prompt and reply. Raises ValueError."""
    before = apply(tokenizer, messages[:i], tools, add_generation_prompt=True)
    after = apply(tokenizer, messages[: i + 1], tools)
    if after.startswith(before):
        return before, after
    content, calls = messages[i]["content"], "tool_calls" in messages[i]
    placed = {k: v for k, v in messages[i].items() if k != "tool_calls"} | dict(content=PLACE)
    placed = apply(tokenizer, [*messages[:i], placed], tools)
    head, found, tail = placed.partition(PLACE)
    if found and head.startswith(apply(tokenizer, messages[:i], tools)):
        # DeepSeek's begins a thought in the prompt, but writes replies without their thoughts
        if content.strip() not in after and not calls:
            after = head + content + tail
        before = before if after.startswith(before) else head
        found = content.strip() in after and after.startswith(before)
    elif found:
        # Mistral's writes the system prompt only while no reply follows
        asked = before[before.rfind(messages[i - 1]["content"].strip()) :]
        _, same, rest = head.rpartition(asked)
        found = same and after.startswith(head)
        after = before + after[len(head) - len(rest) :]
    if not found:
        raise ValueError("the chat template writes earlier turns differently when a reply "
                         "follows, so that replies cannot be told from prompts")
    return before, after


# --- records ---------------------------------------------------------------------------------


def read_messages(record: dict, keys: tuple) -> tuple[list[dict], int]:
    """The messages of a record as templates take them, and how many of them are a prompt."""
    given = 0
    if keys[0] == "instruction":
        asked = filter(None, (record["instruction"], record.get("input")))
        messages = [dict(role="user", content="\n\n".join(asked)),
                    dict(role="assistant", content=record["output"])]
    elif keys[0] == "prompt":
        prompt, reply = (record[key] if isinstance(record[key], list)
                         else [dict(role=role, content=record[key])]
                         for key, role in zip(keys, ("user", "assistant"), strict=True))
        messages, given = prompt + reply, len(prompt)
    else:
        messages = record[keys[0]]
    if not messages or not isinstance(messages, list) or not isinstance(messages[0], dict):
        raise ValueError(f"{keys[0]}: expected a list of messages, found {messages!r:.50}")
    messages = [read_message(message) for message in messages]
    if record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, dict(role="system", content=record["system"]))
    return messages, given


def read_message(message: dict) -> dict:
    """With role and content, and with the arguments of tool calls as objects.

    weight 0, as in OpenAI's format, is of a reply that the loss leaves out.
    """
    message = without_none(message)
    if "from" in message:
        role, content = message.pop("from"), message.pop("value")
        if role not in ROLES:
            raise ValueError(f"from {role!r}: expected one of {', '.join(ROLES)}")
        message |= dict(role=ROLES[role], content=content)
        if role == "function_call":
            calls = json.loads(content)
            message |= dict(content="", tool_calls=calls if isinstance(calls, list) else [calls])
    if message.get("tool_calls"):
        message.setdefault("content", "")
        calls = [call if "function" in call else dict(type="function", function=call)
                 for call in message["tool_calls"]]
        message["tool_calls"] = with_arguments(
            calls, lambda x: json.loads(x) if isinstance(x, str) else x)
    role, content, weight = message["role"], message["content"], message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{role}: weight {weight!r}: expected 0 or 1")
    if isinstance(content, list):  # of parts, which many templates would drop
        kinds = {part["type"] for part in content} - {"text"}
        if kinds:
            raise ValueError(f"content of type {', '.join(sorted(kinds))}; expected text")
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise ValueError(f"{role}: expected text, found {type(content).__name__}")
    return message


def with_arguments(calls: list[dict], change) -> list[dict]:
    """Tool calls with the arguments of their functions changed."""
    functions = [call["function"] for call in calls]
    functions = [f | dict(arguments=change(f.get("arguments", {}))) for f in functions]
    return [call | dict(function=f) for call, f in zip(calls, functions, strict=True)]


def without_none(x):
    """Without keys of None, which Parquet has where other rows have a value."""
    if isinstance(x, dict):
        return {k: without_none(v) for k, v in x.items() if v is not None}
    return [without_none(v) for v in x] if isinstance(x, list) else x


def read_tools(tools) -> list | None:
    """The `tools` of a record; Parquet often has them as JSON."""
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not isinstance(tools, list):
        raise ValueError(f"tools: expected a list, found {type(tools).__name__}")
    return without_none(tools) or None


# --- templates -------------------------------------------------------------------------------


def apply(tokenizer, messages: list[dict], tools: list | None, tokenize=False, **options):
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=tokenize, **options)
    except TemplateError as e:
        raise ValueError(f"the chat template refuses it: {e}") from None


def end_of_turn(tokenizer) -> int | None:
    """The special token that the template writes after a reply; None if it writes another text."""
    try:
        text = apply(tokenizer, [dict(role="user", content="a"),
                                 dict(role="assistant", content=PLACE)], None)
    except (ValueError, TypeError, LookupError):  # no template, or one of its own kind
        return None
    ids = tokenizer(text.partition(PLACE)[2].strip(), add_special_tokens=False)["input_ids"]
    token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
    return ids[0] if token and token.special else None


def marked(tokenizer, messages, tools, whole: str) -> list[list[Part]] | None:
    """By the template's {% generation %} marks; None where it has none."""
    if not tokenizer.is_fast or not MARKED.search(tokenizer.get_chat_template(tools=tools)):
        return None
    encoded = apply(tokenizer, messages, tools, tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True,
                    tokenizer_kwargs=dict(return_offsets_mapping=True))
    mask, offsets = encoded["assistant_masks"], encoded["offset_mapping"]
    parts, done = [], 0
    for counted, tokens in groupby(zip(mask, offsets, strict=True), key=lambda pair: pair[0]):
        *_, (_, (_, end)) = tokens
        parts.append((whole[done:end], bool(counted)))
        done = end
    return [[*parts, (whole[done:], False)]] if any(mask) else None


def one_document(whole: str, turns: list[tuple[str, str]], eos: str) -> list[list[Part]] | None:
    """The conversation, if each turn is written the same whatever follows."""
    parts, done = [], 0
    for before, after in turns:
        if not whole.startswith(after):
            after = after.removesuffix(eos)  # Phi-3's ends the last turn with it
        if not (after.startswith(before) and whole.startswith(after)):
            return None
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [[*parts, (whole[done:], False)]]


def end_at_eos(parts: list[Part], eos: str) -> list[Part]:
    """Without empty parts, and without the white space that follows the last end-of-text."""
    parts = [part for part in parts if part[0]]
    if parts and parts[-1][0].rstrip().endswith(eos):
        parts[-1] = parts[-1][0].rstrip(), parts[-1][1]  # the document ends there
    elif len(parts) > 1 and not parts[-1][0].strip() and parts[-2][0].endswith(eos):
        parts.pop()  # white space outside the marks
    return parts
