"""Ends a run without progress, and names the stuck rank, its phase and its line of code.

One thread looks at the training thread and judges. Another exchanges notes with the other ranks
through torchrun's store, and may block if the network is gone. Both run while training is stuck in
C++, in a collective or in I/O, and cost a step nothing. A lone process only gets a warning: it may
be waiting for its user.
"""

import contextlib
import faulthandler
import json
import math
import os
import threading
import time
import traceback

import torch.distributed as dist

from steady.ranks.ranks import PATIENT, rank_and_world, rank_list, stores
from steady.watch.findings import duration
from steady.watch.history import OUTSIDE_PHASES
from steady.watch.sampler import frame_of, short, worth_naming
from steady.watch.sinks import alert

LAST_WORDS = 10.0  # seconds for writing files before the process ends
MOST_ROWS = 16  # in a table of ranks
SLOW = ("steady.checkpoints.writer", "steady.checkpoints.state", "steady.checkpoints.checkpoint",
        "torch._dynamo.convert_frame", "torch._inductor.compile_fx")  # modules


def start_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name="watchdog", daemon=True)
    thread.start()
    return thread


class Watchdog:
    """Watches the thread that made it until its context ends; made on all ranks together.

    seconds: allowed in a phase of a step; 0 switches it off.
    """

    def __init__(self, seconds: float):
        self.rank, _, self.world_size, _ = rank_and_world()
        self.seconds, self.thread, self.ended = seconds, threading.get_ident(), threading.Event()
        self.progress, self.first_step, self.folder, self.clock = None, 0, None, None
        # in a hang of a thousand ranks, each reads a thousand notes in this time
        self.period = min(max(1.0, self.world_size / 64), seconds / 10)
        self.place, self.age = (0, "start-up", 0.0), 0.0  # (step, phase, when it began), seconds
        self.awake = 0.0  # seconds, not counting pauses of this process
        self.notes = {}  # rank → its newest note, and when it came, as "heard"
        self.answered = 0.0  # when the store last answered
        self.verdict = ""  # the code of a hang, and the rank to report it
        self.store = None
        if seconds and self.world_size > 1:
            # a connection of its own, as another thread may block in the first one
            self.store = dist.PrefixStore("watchdog", stores[0].clone())
            self.publish()
            start_thread(self.talk)
            start_thread(self.look)

    def follow(self, progress, run_dir, clock):
        """Call once the run exists, and again after a rollback: first steps take longer."""
        self.progress, self.first_step = progress, progress.step + 1
        self.folder, self.clock = run_dir.path, clock

    def __enter__(self):
        if self.seconds and not self.store:
            start_thread(self.look)

    def __exit__(self, *error):
        self.ended.set()

    # --- this rank ---

    def look(self):
        """Every period: end the run if there is no progress."""
        before = time.monotonic()
        while not self.ended.wait(self.period):
            now = time.monotonic()
            self.measure(min(now - before, 2 * self.period))  # more after Ctrl-Z
            before = now
            hang = None if self.verdict else self.judge()
            if (hang or self.verdict) and not self.ended.is_set():
                self.end(hang)

    def measure(self, passed: float):
        """Count the seconds of the training thread in its phase."""
        place = self.place if not self.progress else (
            self.progress.step, self.clock.current, self.clock.since)
        self.age = self.age + passed if place == self.place else 0.0
        self.place, self.awake = place, self.awake + passed

    def stack(self) -> list[tuple[str, str]]:
        """(module, line of code) of the training thread's frames, innermost first.

        A line in torch or the standard library is "".
        """
        found = []
        with frame_of(self.thread) as innermost:
            for frame, number in traceback.walk_stack(innermost):
                file, function = frame.f_code.co_filename, frame.f_code.co_name
                line = f"{short(file)}:{number} in {function}" if worth_naming(file) else ""
                found.append((str(frame.f_globals.get("__name__")), line))
        return found

    def note(self) -> dict:
        """The state of this rank, for the others."""
        (step, phase, _), stack = self.place, self.stack()
        slow = (not self.progress or step <= self.first_step or phase in OUTSIDE_PHASES
                or any(module in SLOW for module, _ in stack))
        in_collective = any(module.startswith("torch.distributed.") for module, _ in stack[:12])
        return dict(awake=self.awake, host=os.uname().nodename, step=step, phase=phase,
                    age=self.age, limit=self.seconds * (PATIENT if slow else 1),
                    waits=phase == "waiting" or in_collective, ended=self.ended.is_set(),
                    line=next((line for _, line in stack if line), ""))

    # --- the others ---

    def talk(self):
        """Every period, and once after the end: publish and read notes."""
        ended = False
        while not ended:
            ended = self.ended.wait(self.period)
            with contextlib.suppress(Exception):  # `judge` notices the silence
                self.publish()
                if self.age > self.seconds / 5:
                    self.listen()
                self.answered = self.awake

    def publish(self):
        self.store.set(str(self.rank), json.dumps(self.note()))

    def listen(self):
        if self.store.check(["verdict"]):
            self.verdict = self.store.get("verdict").decode()
        keys = [str(rank) for rank in range(self.world_size)]
        if self.store.check(keys):  # else some are not there yet
            for rank, text in enumerate(self.store.multi_get(keys)):
                note = json.loads(text)
                if not note.items() <= self.notes.get(rank, {}).items():  # a new note
                    self.notes[rank] = note | {"heard": self.awake}

    def judge(self) -> tuple[str, list[int], dict] | None:
        """(code, ranks to blame, notes) of a hang; None while some rank may make progress."""
        mine = self.note()
        if mine["age"] <= mine["limit"]:
            return None
        if self.store and self.awake - self.answered > 8 * self.period:
            return "store", [], {self.rank: mine}
        notes = {rank: dict(note) for rank, note in [*self.notes.items()] if not note["ended"]}
        notes[self.rank] = mine | {"heard": self.awake}
        silent = [rank for rank in notes if self.awake - notes[rank]["heard"] > 8 * self.period]
        for rank in silent:
            notes[rank]["age"] = self.awake - notes[rank]["heard"]
        if any(note["age"] <= note["limit"] for note in notes.values()):
            return None
        return *find(notes, silent), notes

    # --- the end ---

    def end(self, hang: tuple | None):
        """Report a hang, write this rank's stacks, and end the process; a lone one goes on.

        None: another rank has reported it.
        """
        if self.world_size == 1:
            self.report(*hang)
            self.age = -math.inf  # silent until training moves on
            return
        waits = self.note()["waits"]
        start_thread(self.last_words, hang).join(LAST_WORDS)  # a disk may not answer
        if waits and self.verdict.startswith("stuck"):
            # the end of the stuck rank breaks this one's collective: its training thread saves
            self.ended.wait(max(LAST_WORDS, self.seconds))
        os._exit(1)

    def last_words(self, hang: tuple | None):
        if hang:
            mine = self.verdict = f"{hang[0]} {self.rank}"
            if hang[0] != "store":  # setting the verdict would block
                self.verdict = self.store.compare_set("verdict", "", mine).decode()
            if self.verdict == mine:
                self.report(*hang)
        self.write_stacks()
        time.sleep(4 * self.period)  # torchrun ends the others as soon as one leaves

    def report(self, code: str, blamed: list[int], notes: dict[int, dict]):
        """Report a hang in files, then on the screen."""
        headline = describe(code, blamed, notes)
        if self.folder:
            row = {"step": self.place[0], "hang": headline, "hang_code": code, "hang_ranks": blamed}
            with contextlib.suppress(OSError), open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        begin, end = "train.py: failed", "--auto_resume continues from the newest checkpoint"
        if self.world_size == 1:
            begin, end = "warning", "still waiting, as no other process needs this one"
            self.write_stacks()
        where = f"; stacks are in {self.folder / 'stacks'}" if self.folder else ""
        alert(f"{begin}: no progress: {headline}{where}; {end}\n{table(blamed, notes)}")

    def write_stacks(self):
        if self.folder:
            with contextlib.suppress(OSError):
                (self.folder / "stacks").mkdir(exist_ok=True)
                with open(self.folder / "stacks" / f"rank_{self.rank}.txt", "a", 1) as file:
                    file.write(f"\n{time.strftime('%F %T')}: {position(self.note())}\n")
                    faulthandler.dump_traceback(file, all_threads=True)


# --- judging the notes of all ranks ------------------------------------------------------------


def find(notes: dict[int, dict], silent: list[int]) -> tuple[str, list[int]]:
    """(code, ranks to blame) of a hang; notes: of all ranks that have not ended."""
    if silent:
        return "silent", silent
    busy = [rank for rank in sorted(notes) if not notes[rank]["waits"]]
    if busy:  # on a GPU, ranks that wait may still fill its queue, but in a later step
        first = min(notes[rank]["step"] for rank in busy)
        return "stuck", [rank for rank in busy if notes[rank]["step"] == first]
    places = {}
    for rank in sorted(notes):
        places.setdefault((notes[rank]["step"], notes[rank]["line"]), []).append(rank)
    return "waiting", min(places.values(), key=len) if len(places) > 1 else []


def describe(code: str, blamed: list[int], notes: dict[int, dict]) -> str:
    """The line about a hang."""
    if code == "store":
        return "no answer from torchrun's store: its host, or the network to it, is gone"
    if not blamed:
        return "all ranks wait for one another: check the network between the hosts"
    hosts = ", ".join(sorted({notes[rank]["host"] for rank in blamed}))
    who, first = f"{rank_list(blamed)} (host {hosts})", notes[blamed[0]]
    where = position(first) + (f" at {first['line']}" if first["line"] else "")
    return {
        "silent": f"no answer from {who}, last in {where}: dead, stopped, or its network is gone",
        "stuck": f"{who}: stuck in {where}",
        "waiting": f"all ranks wait for one another, and {who} elsewhere, in {where}: a collective "
                   "skipped, or the network between the hosts",
    }[code]


def table(blamed: list[int], notes: dict[int, dict]) -> str:
    """A row for each rank, those to blame first."""
    ranks = sorted(notes, key=lambda rank: (rank not in blamed, rank))
    rows = [(f"rank {rank}", notes[rank]["host"], position(notes[rank]),
             duration(notes[rank]["age"]), notes[rank]["line"]) for rank in ranks[:MOST_ROWS]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    more = [f"  and {len(ranks) - MOST_ROWS} more ranks"] if len(ranks) > MOST_ROWS else []
    return "\n".join(lines + more)


def position(note: dict) -> str:
    step, phase = note["step"], note["phase"]
    if phase == "start-up":
        return phase
    return f"{phase} after step {step}" if phase in OUTSIDE_PHASES else f"{phase} of step {step+1}"
