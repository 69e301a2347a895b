"""Conversations as a tokenizer's chat template writes them; what assistants say counts."""

import json
import re
from itertools import groupby

from steady.options import ConfigError

Part = tuple[str, bool]  # text, and whether the loss counts it

PLACE = "\0the reply\0"  # stands where a template puts the content of a message
ROLES = dict(system="system", human="user", user="user", gpt="assistant", assistant="assistant",
             tool="tool")  # of a message with `from` and `value`
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def chat_documents(tokenizer, record: dict, keys: tuple) -> list[list[Part]]:
    """The documents of a conversation.

    keys: those that hold it, one of read.RECORDS. Replies are what the template marks as generated.
    Where it has no marks, a reply begins where the template, asked for the next one, leaves off;
    and where it writes earlier turns differently when more follow, as Qwen3's, which drops their
    thoughts, each reply ends a document of its own. Raises ValueError where none of this works.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(f"these are chats ({keys[0]}): add --tokenizer NAME with a chat template")
    messages, tools = read_messages(record, keys), read_tools(record.get("tools"))
    try:
        documents = write_documents(tokenizer, messages, tools)
    except TypeError:  # DeepSeek's template takes the arguments of a call as JSON
        for message in messages:
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        documents = write_documents(tokenizer, messages, tools)
    return [end_at_eos(parts, tokenizer.eos_token) for parts in documents]


def write_documents(tokenizer, messages: list[dict], tools: list | None) -> list[list[Part]]:
    """As chat_documents; replies of weight 0 are prompt."""
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    counted = [i for i in replies if messages[i].get("weight", 1)]
    whole = apply(tokenizer, messages, tools)
    for message in messages:
        said = message["content"].strip()
        as_json = json.dumps(said, ensure_ascii=False)[1:-1]  # as some write results of tools
        if (message["role"] not in ("system", "assistant")
                and said not in whole and as_json not in whole):
            raise ValueError(f"the chat template leaves out what {message['role']} says")
        if any(call["function"]["name"] not in whole for call in message.get("tool_calls", ())):
            raise ValueError("the chat template leaves out tool calls")
    if counted == replies and (parts := marked(tokenizer, messages, tools, whole)):
        return [parts]
    # a greeting, at 0, answers nobody
    turns = [reply_of(tokenizer, messages, i, tools) for i in counted if i > 0]
    if parts := one_document(whole, turns, tokenizer.eos_token):
        return [parts]
    return [[(before, False), (after[len(before) :], True)] for before, after in turns]


def reply_of(tokenizer, messages: list[dict], i: int, tools: list | None) -> tuple[str, str]:
    """The conversation up to reply i: its prompt, and prompt and reply. Raises ValueError."""
    before = apply(tokenizer, messages[:i], tools, add_generation_prompt=True)
    after = apply(tokenizer, messages[: i + 1], tools)
    if after.startswith(before):
        return before, after
    # the template writes the prompt differently when a reply follows: the reply goes after the
    # prompt, from where both have the last thing that was said
    content = messages[i]["content"]
    placed = {k: v for k, v in messages[i].items() if k != "tool_calls"} | dict(content=PLACE)
    head, _, tail = apply(tokenizer, [*messages[:i], placed], tools).partition(PLACE)
    reply = after.removeprefix(head)
    if content.strip() not in reply and "tool_calls" not in messages[i]:
        reply = content + tail  # DeepSeek's leaves out what was thought
    asked = messages[i - 1]["content"].strip() or "\n"
    begun, written = (text.rpartition(asked)[2] for text in (before, head))
    if begun.startswith(written) and not (written + reply).startswith(begun):
        # DeepSeek's begins a thought, which this reply lacks
        before = before.removesuffix(begun) + written
        begun = written
    if not after.startswith(head) or not (written + reply).startswith(begun):
        raise ValueError("the chat template writes earlier turns differently when a reply "
                         "follows, so that replies cannot be told from prompts")
    return before, before + (written + reply)[len(begun) :]


# --- records ---------------------------------------------------------------------------------


def read_messages(record: dict, keys: tuple) -> list[dict]:
    """The messages of a record as templates take them."""
    if keys[0] == "instruction":
        asked = filter(None, (record["instruction"], record.get("input")))
        messages = [dict(role="user", content="\n\n".join(asked)),
                    dict(role="assistant", content=record["output"])]
    elif keys[0] == "prompt":
        messages = [message | dict(weight=0) for message in record["prompt"]]
        messages += record["completion"]
    else:
        messages = record[keys[0]]
    if not messages or not isinstance(messages, list) or not isinstance(messages[0], dict):
        raise ValueError(f"{keys[0]}: expected a list of messages, found {messages!r:.50}")
    messages = [read_message(message) for message in messages]
    if record.get("system") and messages[0]["role"] != "system":
        messages.insert(0, dict(role="system", content=record["system"]))
    return messages


def read_message(message: dict) -> dict:
    """With role and content, and with the arguments of tool calls as objects.

    weight 0, as in OpenAI's format, is of a reply that the loss leaves out.
    """
    message = without_none(message)
    if "from" in message:
        role = message.pop("from")
        if role not in ROLES:
            raise ValueError(f"from {role!r}: expected one of {', '.join(ROLES)}")
        message |= dict(role=ROLES[role], content=message.pop("value"))
    if message.get("tool_calls"):
        message.setdefault("content", "")
    for call in message.get("tool_calls", ()):
        arguments = call["function"].setdefault("arguments", {})
        if isinstance(arguments, str):
            call["function"]["arguments"] = json.loads(arguments)
    role, content = message["role"], message["content"]
    if isinstance(content, list):  # of parts, which many templates would drop
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise ValueError(f"{role}: expected text, found {type(content).__name__}")
    return message


def without_none(x):
    """Without keys of None, which Parquet has where other rows have a value."""
    if isinstance(x, dict):
        return {k: without_none(v) for k, v in x.items() if v is not None}
    return [without_none(v) for v in x] if isinstance(x, list) else x


def read_tools(tools) -> list | None:
    """The `tools` of a record; Parquet often has them as JSON."""
    tools = json.loads(tools) if tools and isinstance(tools, str) else tools
    if tools and not isinstance(tools, list):
        raise ValueError(f"tools: expected a list, found {type(tools).__name__}")
    return without_none(tools) or None


# --- templates -------------------------------------------------------------------------------


def apply(tokenizer, messages: list[dict], tools: list | None, tokenize=False, **options):
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=tokenize, **options)
    except (TemplateError, ArithmeticError) as e:
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


def marked(tokenizer, messages, tools, whole: str) -> list[Part] | None:
    """By the template's {% generation %} marks; None where it has none."""
    if not MARKED.search(tokenizer.get_chat_template(tools=tools)):
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
    return [*parts, (whole[done:], False)] if any(mask) else None


def one_document(whole: str, turns: list[tuple[str, str]], eos: str) -> list[Part] | None:
    """The conversation, if the template writes each turn the same whatever follows."""
    parts, done = [], 0
    for before, after in turns:
        if not whole.startswith(after):
            after = after.removesuffix(eos)  # Phi-3's ends the last turn with it
        if not (after.startswith(before) and whole.startswith(after)):
            return None
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*parts, (whole[done:], False)]


def end_at_eos(parts: list[Part], eos: str) -> list[Part]:
    """Without empty parts, and without the white space that follows the last end-of-text."""
    parts = [part for part in parts if part[0]]
    if parts and parts[-1][0].rstrip().endswith(eos):
        parts[-1] = parts[-1][0].rstrip(), parts[-1][1]  # the document ends there
    elif len(parts) > 1 and not parts[-1][0].strip() and parts[-2][0].endswith(eos):
        parts.pop()  # white space outside the marks
    return parts
