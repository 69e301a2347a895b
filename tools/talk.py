"""python model.py chat: a talk with a model, which remembers what was said.

Where the input is not a terminal, all of it is one prompt, and only the answer is printed.
"""

import contextlib
import sys

from tools.generate import Screen, Writer

HELP = "/system TEXT, /reset; Ctrl-C stops an answer, Ctrl-D ends the talk"


def talk(writer: Writer, system: str):
    chats = bool(writer.tokenizer.chat_template)
    if not chats:
        print(f"note: the tokenizer of {writer.source} has no chat template: each prompt is "
              "continued as plain text, by itself", file=sys.stderr)
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
            text = answer(writer, fit(writer, system, history))
            history.append(dict(role="assistant", content=text))


def with_system(system: str) -> list[dict]:
    return [dict(role="system", content=system)] if system else []


def fit(writer: Writer, system: str, history: list[dict]) -> list[int]:
    """The ids of the talk, without its oldest turns if it leaves no room for an answer."""
    while True:
        ids = writer.chat_ids([*with_system(system), *history])
        context = writer.context(len(ids))
        if len(history) == 1 or len(ids) + min(writer.max_new_tokens, context // 2) <= context:
            return ids
        del history[:2]
        print("note: the oldest question is forgotten, to make room", file=sys.stderr)


def answer(writer: Writer, ids: list[int]) -> str:
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
