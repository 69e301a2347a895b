"""The screen is a sink like the others: a failed write is lost, and training goes on.

Writes fail on a full disk, into a full pipe that does not block, or once a terminal or reader is
gone. The next write that succeeds first reports the loss and its reason.
"""

import os
from threading import get_ident

# Characters in data and names that control a terminal, or that no encoding has
CONTROLS = {*range(32), *range(0x7F, 0xA0), *range(0xD800, 0xE000)} - {*map(ord, "\t\n\r")}
SHOWN = {code: ascii(chr(code))[1:-1] for code in CONTROLS}


class Printable:
    """Takes the place of sys.stdout or sys.stderr; escapes characters that would control it."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.translate(SHOWN).encode(encoding, "replace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


class Screen(Printable):
    """A Printable that writes whole lines, and unfinished ones at a `flush`."""

    def __init__(self, stream):
        super().__init__(stream)
        self.fd = stream.fileno()
        self.begun = {}  # thread → its line so far
        self.lost, self.reason = 0, ""

    def write(self, text: str) -> int:
        self.begun[get_ident()] = self.begun.get(get_ident(), "") + text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self):
        text = self.begun.pop(get_ident(), "").translate(SHOWN)
        data = text.encode(self.stream.encoding, "replace")
        try:
            if data and self.lost:
                os.write(self.fd, f"[lost: {self.lost} bytes, {self.reason}]\n".encode())
                self.lost = 0
            while data:
                data = data[os.write(self.fd, data):]
        except OSError as e:
            self.lost, self.reason = self.lost + len(data), e.strerror
