"""python model.py chat: a conversation with a model.

Input from a pipe or a file is one prompt, and only the answer is printed.
"""

import contextlib
import io
import sys

from steady.options import ConfigError

HELP = "/system TEXT, /reset; Ctrl-C stops an answer, Ctrl-D quits"


def talk(writer, system: str):
    """writer: generate.Writer."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        said = dict(role="user", content=sys.stdin.read().strip())
        Answer(writer, writer.chat_ids([*with_system(system), said])).write()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit and recall lines
    print(HELP)
    history = []  # messages
    while True:
        try:
            said = input("> ").strip()
        except KeyboardInterrupt:
            said = "/help"
            print()
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
        elif said:
            history.append(dict(role="user", content=said))
            try:
                ids = fit(writer, system, history)
            except ConfigError as e:  # of a template without system prompts, say
                print(f"error: {e}", file=sys.stderr)
                history.pop()
                continue
            answer = Answer(writer, ids)
            with contextlib.suppress(KeyboardInterrupt):
                answer.write()
            history.append(dict(role="assistant", content=answer.text))


def with_system(system: str) -> list[dict]:
    return [dict(role="system", content=system)] if system else []


def fit(writer, system: str, history: list[dict]) -> list[int]:
    """The ids of the conversation; drops the oldest turns until there is room for an answer."""
    context = writer.context()
    while True:
        ids = writer.chat_ids([*with_system(system), *history])
        if len(history) == 1 or len(ids) + min(writer.max_new_tokens, context // 2) <= context:
            return ids
        del history[:2]
        print("note: the oldest question is forgotten, to make room", file=sys.stderr)


class Answer:
    """Prints an answer as it is written, in complete characters, and keeps it as `text`."""

    def __init__(self, writer, prompt: list[int]):
        self.writer, self.prompt, self.text = writer, prompt, ""
        # decoded after the prompt: SentencePiece's decoders drop a space at the beginning
        self.ids = prompt[-32:]
        self.begin, self.done = 0, len(self.ids)  # start of the text decoded again; printed

    def write(self):
        try:
            self.writer.write(self.prompt, self.add)
            self.show(complete=False)
        finally:
            print(flush=True)

    def add(self, token: int):
        if token not in self.writer.stop:
            self.ids.append(token)
            self.show()

    def show(self, complete: bool = True):
        decode = self.writer.tokenizer.decode
        old = decode(self.ids[self.begin : self.done], skip_special_tokens=True)
        new = decode(self.ids[self.begin :], skip_special_tokens=True)
        if new.endswith("\ufffd") and complete:  # inside a character
            return
        self.text += new[len(old) :]
        print(new[len(old) :], end="", flush=True)
        self.begin, self.done = self.done, len(self.ids)
