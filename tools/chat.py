"""Conversations as a tokenizer's chat template writes them; what assistants say counts."""

import json
import re
from itertools import groupby

from steady.cli import ConfigError

Part = tuple[str | bytes, bool]  # text, and whether the loss counts it

MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def chat_documents(tokenizer, record: dict) -> tuple[list[list[Part]], str]:
    """The documents of a conversation, and how its replies were told from its prompts.

    Replies are what the template marks as generated ("marks"). Where it has no marks, a reply
    begins where the template, asked for the next one, would leave off (""); and where it writes
    earlier turns differently when more follow, as Qwen3's drops what was thought, each reply is
    the end of a document of its own ("turns"). Raises ValueError where none of them can be done.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError("messages need a --tokenizer that has a chat template")
    messages, tools = record["messages"], read_tools(record.get("tools"))

    def written(n: int, **options):
        return apply(tokenizer, messages[:n], tools, **options)

    replies = [i for i, message in enumerate(messages)
               if message["role"] == "assistant" and i > 0]  # a greeting answers nobody
    whole = written(len(messages))
    documents, how = marked(tokenizer, messages, tools, whole), "marks"
    if documents is None:
        befores = [written(i, add_generation_prompt=True) for i in replies]
        afters = [whole if i + 1 == len(messages) else written(i + 1) for i in replies]
        documents, how = one_document(whole, befores, afters), ""
    if documents is None:
        documents, how = one_per_reply(befores, afters), "turns"
    return [end_at_eos(parts, tokenizer.eos_token) for parts in documents], how


def read_tools(tools) -> list | None:
    """The `tools` of a record; Parquet often has them as JSON."""
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not isinstance(tools, list):
        raise ValueError(f"tools: expected a list, found {type(tools).__name__}")
    return tools or None


def apply(tokenizer, messages: list[dict], tools: list | None, tokenize=False, **options):
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=tokenize, **options)
    except TemplateError as e:
        raise ValueError(f"the chat template refuses it: {e}") from None


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


def one_document(whole: str, befores: list[str], afters: list[str]) -> list[list[Part]] | None:
    """The conversation, if each turn is written the same whatever follows."""
    parts, done = [], 0
    for before, after in zip(befores, afters, strict=True):
        if not (after.startswith(before) and whole.startswith(after)):
            return None
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [[*parts, (whole[done:], False)]]


def one_per_reply(befores: list[str], afters: list[str]) -> list[list[Part]]:
    """The messages up to each reply, of which the reply alone counts."""
    for before, after in zip(befores, afters, strict=True):
        if not after.startswith(before):
            raise ValueError("the chat template writes earlier turns differently when a reply "
                             "follows, so that replies cannot be told from prompts")
    return [[(before, False), (after[len(before) :], True)]
            for before, after in zip(befores, afters, strict=True)]


def end_at_eos(parts: list[Part], eos: str) -> list[Part]:
    """Without empty parts, and without the white space that follows the last end-of-text."""
    parts = [part for part in parts if part[0]]
    if parts and parts[-1][0].rstrip().endswith(eos):
        parts[-1] = parts[-1][0].rstrip(), parts[-1][1]  # the document ends there
    elif len(parts) > 1 and not parts[-1][0].strip() and parts[-2][0].endswith(eos):
        parts.pop()  # white space outside the marks
    return parts
