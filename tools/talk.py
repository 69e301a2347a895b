"""python model.py chat: a conversation with a model, which keeps its history.

Where the input is not a terminal, all of it is one prompt, and only the answer is printed.
"""

import contextlib
import io
import sys

from steady.options import ConfigError

HELP = "/system TEXT, /reset; Ctrl-C stops an answer, Ctrl-D quits"


def talk(writer, system: str):
    """writer: generate.Writer."""
    chats = bool(writer.tokenizer.chat_template)
    if not chats:
        print(f"note: the tokenizer of {writer.source} has no chat template: each prompt is "
              "continued as plain text, by itself", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        said = sys.stdin.read().strip()
        messages = [*with_system(system), dict(role="user", content=said)]
        answer(writer, writer.chat_ids(messages) if chats else writer.ids(said))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit and recall lines
    print(HELP)
    history = []  # messages
    while True:
        try:
            said = input("> ").strip()
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        except EOFError:
            print()
            return
        command, _, text = said.partition(" ")
        if command == "/system":
            system = text.strip()
        elif command == "/reset":
            history = []
        elif command.startswith("/"):
            print(HELP)
        elif not chats:
            answer(writer, writer.ids(said))
        elif said:
            history.append(dict(role="user", content=said))
            try:
                ids = fit(writer, system, history)
            except ConfigError as e:  # of a template without system prompts, say
                print(f"error: {e}", file=sys.stderr)
                history.pop()
                continue
            text = answer(writer, ids)
            history.append(dict(role="assistant", content=text))


def with_system(system: str) -> list[dict]:
    return [dict(role="system", content=system)] if system else []


def fit(writer, system: str, history: list[dict]) -> list[int]:
    """The ids of the conversation, without its oldest turns where they leave no room to answer."""
    while True:
        ids = writer.chat_ids([*with_system(system), *history])
        context = writer.context(len(ids))
        if len(history) == 1 or len(ids) + min(writer.max_new_tokens, context // 2) <= context:
            return ids
        del history[:2]
        print("note: the oldest question is forgotten, to make room", file=sys.stderr)


def answer(writer, ids: list[int]) -> str:
    """Print the answer as it is written; Ctrl-C ends it. Returns its text."""
    writer.warn_of_length(ids)
    screen = Screen(writer, ids)
    try:
        writer.write([ids], screen.add)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print(flush=True)
    return screen.text


# --- answers as text -------------------------------------------------------------------------


class Screen:
    """Prints an answer while it is written, in complete characters."""

    def __init__(self, writer, prompt: list[int]):
        self.writer, self.text = writer, ""
        # decoded behind the prompt, since SentencePiece's decoders drop a space at the beginning
        self.ids = end_of_prompt(writer.tokenizer, prompt)
        self.begin, self.done = 0, len(self.ids)  # what is decoded again; what is printed

    def add(self, token: int):
        if token in self.writer.stop:
            return
        self.ids.append(token)
        decode = self.writer.tokenizer.decode
        old = decode(self.ids[self.begin : self.done], skip_special_tokens=True)
        new = decode(self.ids[self.begin :], skip_special_tokens=True)
        if not new.endswith("\ufffd"):  # otherwise inside a character
            self.text += new[len(old) :]
            print(new[len(old) :], end="", flush=True)
            self.begin, self.done = self.done, len(self.ids)


def end_of_prompt(tokenizer, ids: list[int]) -> list[int]:
    """The last ids of a prompt that have a text by themselves."""
    most = min(32, len(ids))
    for n in range(1, most + 1):
        text = tokenizer.decode(ids[-n:], skip_special_tokens=True)
        if text and "\ufffd" not in text:  # which would be the middle of a character
            return ids[-n:]
    return []


def text_after(tokenizer, prompt: list[int], answer: list[int]) -> str:
    before = end_of_prompt(tokenizer, prompt)
    both = tokenizer.decode(before + answer, skip_special_tokens=True)
    return both[len(tokenizer.decode(before, skip_special_tokens=True)) :]
