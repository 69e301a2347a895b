"""Notices that training stands still, says which rank is stuck, where and since when, and leaves.

Two threads beside the training thread of each rank, so that they run while that one is stuck in
C++, in a collective, in I/O or in a loop. One looks and judges. The other tells the other ranks
what it saw and hears what they saw, through torchrun's store, and may block where a network is
gone. A step does nothing for it: the monitor knows the phase anyway. steady/hangs.py finds the
words.

A thread that keeps Python's lock for ever, as a loop in a C extension may, stops these two as well:
then the other ranks say so. One process alone does not notice.
"""

import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

from steady import hangs, parallel
from steady.telemetry import OUTSIDE_PHASES, duration

PATIENT = 6  # times --hang_seconds: in start-up, the first two steps, and between steps
SLOWER = 5  # times the longest that a phase has taken recently
LAST_WORDS = 10.0  # seconds in which files may still be written before the process leaves

numbers = itertools.count()  # of the watchdogs of this process


class Watchdog:
    """Watches the thread that makes it, until the end of its context; made on all ranks together.

    seconds: without progress that are always allowed; 0 is off. `run` is set once there is one.
    """

    def __init__(self, seconds: float):
        self.seconds, self.period, self.run = seconds, min(1.0, seconds / 10), None
        self.silence = 8 * self.period  # without a note, after which a rank counts as silent
        self.rank, self.local_rank, self.world_size, self.local_size = parallel.rank_and_world()
        self.thread, self.native_id = threading.get_ident(), threading.get_native_id()
        self.where, self.age = (0, "start-up", 0.0), 0.0  # (step, phase, when it began)
        self.recent = {}  # phase → its longest times of late
        self.awake = 0.0  # seconds, without those in which this process was stopped
        self.beat, self.notes, self.heard = 0, {}, {}  # rank → its newest note, and when it came
        self.kills = hangs.out_of_memory_kills()
        self.verdict, self.ended, self.store = None, threading.Event(), None
        number = next(numbers)
        if seconds and self.world_size > 1:  # its own connection: the other one may be waiting
            self.store = parallel.shared_notes(f"watchdog {number}").clone()
            self.publish()
            threading.Thread(target=self.talk, name="watchdog", daemon=True).start()
            threading.Thread(target=self.look, name="watchdog", daemon=True).start()

    def __enter__(self):
        if self.seconds and not self.store:  # alone, it has nobody to wait for during start-up
            threading.Thread(target=self.look, name="watchdog", daemon=True).start()

    def __exit__(self, *error):
        self.ended.set()

    # --- this rank ---

    def look(self):
        """Every period: is there progress, and if not, whose fault is it?"""
        before = time.monotonic()
        while not self.ended.wait(self.period):
            now = time.monotonic()
            passed = min(now - before, 2 * self.period)  # more if it was stopped, or starved
            before, self.awake = now, self.awake + passed
            self.measure(passed)
            text = self.verdict or self.judge()
            if text and not self.ended.is_set():
                self.leave(text)

    def measure(self, passed: float):
        """Count how long the training thread has been where it is."""
        monitor, where = self.run and self.run.monitor, self.where
        if monitor:
            where = self.run.step, monitor.current, monitor.since
        if where != self.where:
            self.recent.setdefault(self.where[1], deque(maxlen=20)).append(self.age)
            self.where, self.age = where, 0.0
        elif not hangs.in_debugger(self.stack()):
            self.age += passed

    def limit(self) -> float:
        """Seconds that it may be there: more where compilation or files take their time."""
        step, phase, _ = self.where
        patient = self.run is None or step <= self.run.first_step or phase in OUTSIDE_PHASES
        patient = patient or self.age > self.seconds and hangs.in_checkpoint(self.stack())
        longest = max(self.recent.get(phase, (0.0,)))
        return max(self.seconds * (PATIENT if patient else 1), SLOWER * longest)

    def stack(self) -> list[tuple[str, int, str]]:
        """(file, line, function) of the training thread's Python frames, the innermost first."""
        frame, found = sys._current_frames().get(self.thread), []
        while frame:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found

    def note(self) -> dict:
        """What the other ranks should know of this one; more once it makes no progress."""
        step, phase, _ = self.where
        note = dict(beat=self.beat, step=step, phase=phase, age=self.age, limit=self.limit(),
                    marks=self.run.monitor.marks if self.run and self.run.monitor else 0,
                    host=socket.gethostname(), pid=os.getpid())
        if self.age > self.period:
            note |= hangs.details(phase, self.stack(), self.native_id)
            note["gone"] = hangs.gone(self.notes, note["host"])
            note["killed"] = hangs.out_of_memory_kills() > self.kills
        return note

    # --- the others ---

    def talk(self):
        """Every period: tell and hear."""
        while not self.ended.wait(self.period):
            with contextlib.suppress(Exception):  # without a store, `judge` notices the silence
                self.publish()
                self.listen()

    def publish(self):
        self.beat += 1
        self.store.set(str(self.rank), json.dumps(self.note()))

    def listen(self):
        first = self.rank - self.local_rank
        ranks = range(self.world_size) if self.judges else range(first, first + self.local_size)
        keys = [str(rank) for rank in ranks]
        if self.store.check(keys):  # else some have not come that far
            for rank, text in zip(ranks, self.store.multi_get(keys), strict=True):
                note = json.loads(text)
                if note["beat"] != self.notes.get(rank, {}).get("beat"):
                    self.notes[rank], self.heard[rank] = note, self.awake
        if self.store.check(["verdict"]):
            self.verdict = self.store.get("verdict").decode()

    @property
    def judges(self) -> bool:
        """Whether it reads the notes of all ranks: one of each host, since they grow as ranks²."""
        return self.rank < 2 or self.local_rank == 0

    # --- the verdict ---

    def judge(self) -> str | None:
        """What is wrong; None while some rank may be making progress."""
        if self.age <= self.limit():
            return None
        notes = {**self.notes, self.rank: self.note()}
        silence = {rank: self.awake - self.heard.get(rank, 0.0) for rank in notes}
        own_silence = silence.pop(self.rank)
        silent = {rank: seconds for rank, seconds in silence.items() if seconds > self.silence}
        for rank, note in notes.items():
            patient = rank not in silent or note["phase"] == "start-up"
            limit = note["limit"] if patient else self.seconds  # even a checkpoint sends notes
            if note["age"] + silence.get(rank, 0.0) <= limit:
                return None
        lost = self.store and own_silence > self.silence  # not even its own notes come back
        if not self.judges:
            gone = lost or self.rank - self.local_rank in silent  # the one of this host that does
            if not gone or self.age <= 1.5 * self.limit() + 10 * self.period:
                return None
        if lost:
            return hangs.describe_lost(self.rank, notes[self.rank], own_silence)
        try:
            return hangs.describe(notes, silent)
        except Exception as e:  # as where a fork's notes differ: to leave matters more
            return f"{hangs.describe_stuck([self.rank], notes[self.rank])} ({e!r} in the watchdog)"

    def last_signs(self) -> str:
        """After an error: what is known of the ranks and processes that are gone, or ""."""
        gone = hangs.gone(self.notes, socket.gethostname())
        lines = [f"rank {rank} is {state}" for rank, state in gone.items()]
        if hangs.out_of_memory_kills() > self.kills:
            lines.append("the kernel has killed a process on this machine for lack of memory")
        return "; ".join(lines)

    def leave(self, text: str):
        """Say it, once for all ranks, write this rank's stacks, and end the process.

        A rank that waits for others does so a little longer: when they are gone its collective
        fails, and the training thread saves the last step and ends in its own way.
        """
        waits = self.note().get("waits")
        thread = threading.Thread(target=self.last_words, args=(text,), daemon=True)
        thread.start()
        thread.join(LAST_WORDS)  # it may block, as where a disk does not answer
        left = LAST_WORDS * bool(waits)
        while left > 0 and self.age < 2 * PATIENT * self.seconds:
            time.sleep(self.period)
            left -= 0 if hangs.in_checkpoint(self.stack()) else self.period
            self.age += self.period
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stopped would not notice
        os._exit(1)

    def last_words(self, text: str):
        speaks = self.verdict is None
        if speaks and self.store:
            asking = threading.Thread(target=self.tell, args=(text,), daemon=True)
            asking.start()
            asking.join(2 * self.period + 1)
            speaks = self.verdict in (None, self.signed(text))
        folder = self.run and self.run.out_dir
        if speaks:
            where = f"; the stacks of all ranks are in {folder / 'stacks'}" if folder else ""
            print(f"train.py: failed: no progress: {text}{where}; --auto-resume continues from "
                  "the newest checkpoint", file=sys.stderr, flush=True)
        if folder and folder.is_dir():
            with contextlib.suppress(OSError):
                self.write_files(folder, text if speaks else None)
        if self.run and self.run.writer:
            self.run.writer.wait()  # for a checkpoint on its way to the disk
        time.sleep(4 * self.period)  # torchrun ends the others as soon as one leaves

    def tell(self, text: str):
        with contextlib.suppress(Exception):
            self.verdict = self.store.compare_set("verdict", "", self.signed(text)).decode()

    def signed(self, text: str) -> str:
        return f"rank {self.rank} says: {text}"

    def write_files(self, folder: Path, text: str | None):
        step, phase, _ = self.where
        if text:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "hang": text}) + "\n")
        (folder / "stacks").mkdir(exist_ok=True)
        with open(folder / "stacks" / f"rank_{self.rank}.txt", "a") as file:
            print(f"\n{time.strftime('%F %T')}: step {step}, in {phase} for "
                  f"{duration(self.age)}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
