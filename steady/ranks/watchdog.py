"""Ends a run that has stopped making progress, and names the stuck rank, its phase and its line.

A single process that torchrun would not restart only gets a warning.

A second thread looks after the training thread and judges, a third swaps notes with the other
ranks through torchrun's store, and may block if the network is gone. So they also run while
training is stuck in C++, in a collective, in I/O or in a loop. A step does nothing for them: they
read its number, and the phase from a clock if there is one. steady/ranks/hangs.py says who is to
blame. A thread that keeps Python's lock for ever stops these two as well: then other ranks say so.
"""

import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import torch.distributed as dist

from steady.ranks import hangs, ranks
from steady.watch.findings import duration
from steady.watch.history import OUTSIDE_PHASES
from steady.watch.sampler import current_frames
from steady.watch.sinks import alert

PATIENT = 6  # times --hang_seconds: in start-up, the first two steps, and between steps
LAST_WORDS = 10.0  # seconds left for writing files before the process ends


def patience(hang_seconds: float) -> float:
    """Seconds that ranks wait for one another to start."""
    return PATIENT * hang_seconds or 1800


def start_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name="watchdog", daemon=True)
    thread.start()
    return thread


class Watchdog:
    """Watches the thread that makes it, until the end of its context; made on all ranks together.

    seconds: without progress that are always allowed; 0 is off.
    clock: the monitor's, for the phase; without one a step is one phase.
    """

    def __init__(self, seconds: float):
        self.rank, local_rank, self.world_size, local_size = ranks.rank_and_world()
        first = self.rank - local_rank
        self.on_this_host = range(first, first + local_size)
        self.seconds, self.clock = seconds, None
        self.progress, self.first_step, self.run_dir = None, 0, None
        # nobody waits for it, and nobody would start it again: it is not ended
        restarts = ranks.from_environment("TORCHELASTIC_MAX_RESTARTS", 0)
        self.alone, self.reported = self.world_size == 1 and not restarts, None
        # in a hang of a thousand ranks, each reads a thousand notes in this time
        self.period = min(max(1.0, self.world_size / 64), seconds / 10)
        self.quiet = 8 * self.period  # seconds without a note until a rank counts as silent
        self.thread = threading.get_ident()
        self.where, self.age = (0, "start-up", 0.0), 0.0  # (step, phase, when it began)
        self.awake = 0.0  # seconds, not counting pauses of this process
        self.beat, self.notes, self.heard = 0, {}, {}  # rank → its newest note, and when it came
        self.verdict, self.ended, self.store = "", threading.Event(), None
        self.beside = ranks.meet.beside
        if seconds and self.beside:
            self.store = dist.PrefixStore("watchdog", self.beside)
            self.publish()
            start_thread(self.talk)
            start_thread(self.look)

    @property
    def mixed(self) -> bool:
        """Whether a rank left a collective out: sums may be of different steps."""
        return self.verdict.startswith("mismatch")

    def follow(self, progress, run_dir):
        """From here on there is a run.

        Called again after a rollback, since its first steps take longer, too.
        """
        self.progress, self.first_step, self.run_dir = progress, progress.step + 1, run_dir

    def __enter__(self):
        if self.seconds and not self.store:  # alone, it has nobody to wait for during start-up
            start_thread(self.look)

    def __exit__(self, *error):
        self.ended.set()

    # --- this rank ---

    def look(self):
        """Every period: if there is no progress, find the rank to blame."""
        before = time.monotonic()
        while not self.ended.wait(self.period):
            now = time.monotonic()
            passed = min(now - before, 2 * self.period)  # more if it was stopped, or starved
            before, self.awake = now, self.awake + passed
            self.measure(passed)
            hang = None if self.verdict else self.judge()
            if (hang or self.verdict) and not self.ended.is_set():
                self.end(hang)

    def measure(self, passed: float):
        """Count how long the training thread has been in its phase."""
        where, clock = self.where, self.clock
        if self.progress:
            phase = (clock.current, clock.since) if clock else ("training", 0.0)
            where = self.progress.step, *phase
        self.age = self.age + passed if where == self.where else 0.0
        self.where = where

    def limit(self) -> float:
        """Seconds allowed in this phase: more for compilation, files or a person."""
        (step, phase, _), stack = self.where, self.stack()
        if hangs.is_in(stack, hangs.DEBUGGERS):
            return math.inf
        patient = not self.clock or step <= self.first_step or phase in OUTSIDE_PHASES
        patient = patient or hangs.is_in(stack, hangs.SLOW)  # a checkpoint, or compilation
        return self.seconds * (PATIENT if patient else 1)

    def stands_still(self) -> bool:
        """Whether it is time to look at all other ranks, at a cost of some milliseconds."""
        return self.age > min(LAST_WORDS, self.seconds / 5)

    def stack(self) -> list[tuple[str, str, int, str]]:
        """(module, file, line, function) of the training thread's frames, the innermost first."""
        frame, found = current_frames().get(self.thread), []
        while frame:
            code, module = frame.f_code, str(frame.f_globals.get("__name__"))
            found.append((module, code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return found

    def waits(self) -> bool:
        """Whether it is waiting for other ranks."""
        return self.where[1] == "waiting" or hangs.in_collective(self.stack())

    def note(self) -> dict:
        """This rank, for the others; more once it makes no progress."""
        step, phase, _ = self.where
        note = dict(beat=self.beat, step=step, phase=phase, age=self.age, limit=self.limit(),
                    host=socket.gethostname(), pid=os.getpid(), ended=self.ended.is_set())
        if self.stands_still():
            note |= dict(waits=self.waits(), at=hangs.own_line(self.stack()),
                         groups=hangs.collectives(), gone=hangs.gone(self.neighbours()))
        return note

    def neighbours(self) -> dict[int, dict]:
        """The notes of the other ranks on this host."""
        return {rank: self.notes[rank] for rank in self.on_this_host
                if rank in self.notes and rank != self.rank}

    # --- the others ---

    def talk(self):
        """Every period: tell and hear."""
        while not self.ended.wait(self.period):
            with contextlib.suppress(Exception):  # `judge` notices the silence
                self.publish()
                self.listen()
        with contextlib.suppress(Exception):
            self.publish()  # that it has ended: its silence means nothing

    def publish(self):
        self.beat += 1
        self.store.set(str(self.rank), json.dumps(self.note()))

    def listen(self):
        everyone = self.stands_still() or not self.notes
        others = range(self.world_size) if everyone else self.on_this_host
        keys = [str(rank) for rank in others]
        if self.store.check(keys):  # else some have not come that far
            notes, heard = dict(self.notes), dict(self.heard)
            for rank, text in zip(others, self.store.multi_get(keys), strict=True):
                note = json.loads(text)
                if note["beat"] != notes.get(rank, {}).get("beat"):
                    heard[rank], notes[rank] = self.awake, note
            self.heard, self.notes = heard, notes  # at once: the other thread reads them
        if self.store.check(["verdict"]):
            self.verdict = self.store.get("verdict").decode()
        elif self.beside.check([ranks.RESTARTED]):
            self.verdict = ranks.was_restarted(self.beside)
            if self.rank == self.on_this_host[0]:
                alert(f"train.py: failed: {self.verdict}")

    # --- the verdict ---

    def judge(self) -> hangs.Hang | None:
        """Who is to blame; None while some rank may be making progress."""
        if self.age <= self.limit():
            return None
        notes = {rank: note for rank, note in self.notes.items() if not note["ended"]}
        notes[self.rank] = self.note()
        silence = {rank: self.awake - self.heard.get(rank, 0.0) for rank in notes}
        if self.store and silence[self.rank] > self.quiet:  # not even its own notes come back
            return hangs.describe("store", [], {self.rank: notes[self.rank]}, {}, {})
        silent = {rank: seconds for rank, seconds in silence.items()
                  if seconds > self.quiet and rank != self.rank}
        if any(silent.get(rank, note["age"]) <= note["limit"] for rank, note in notes.items()):
            return None
        return hangs.find(notes, silent)

    def last_signs(self) -> str:
        """After an error: the dead ranks of this host, or ""."""
        return "; ".join(f"rank {r} is {state}"
                         for r, state in hangs.gone(self.neighbours()).items())

    def end(self, hang: hangs.Hang | None):
        """Report it, once for all ranks, write this rank's stacks, and end the process.

        None: another rank has reported it. A process alone is left alone: it may be waiting for its
        user, as in input().
        """
        if self.alone:
            if self.where != self.reported:
                self.report(hang)
            self.reported = self.where
            return
        waits = self.waits()
        start_thread(self.last_words, hang).join(LAST_WORDS)  # a disk may not answer
        running = {r: note for r, note in self.neighbours().items() if not note["ended"]}
        for rank, note in running.items():
            if self.awake - self.heard[rank] > self.quiet:
                with contextlib.suppress(OSError):  # stopped, or stuck: torchrun would wait 30 s
                    os.kill(note["pid"], signal.SIGKILL)
        # When the others are gone, its collective fails: the training thread saves, and ends.
        began = time.monotonic()
        while waits:
            saving = hangs.is_in(self.stack(), hangs.SLOW)
            if time.monotonic() > began + max(LAST_WORDS, self.seconds * saving):
                break
            time.sleep(self.period)
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stopped would stay
        os._exit(1)

    def last_words(self, hang: hangs.Hang | None):
        if hang and self.store and hang.code != "store":  # or this would block
            self.verdict = mine = f"{hang.code}, says rank {self.rank}"
            with contextlib.suppress(Exception):
                self.verdict = self.store.compare_set("verdict", "", mine).decode()
            hang = hang if self.verdict == mine else None  # the first one speaks
        self.report(hang)
        if self.run_dir and self.run_dir.writer:
            self.run_dir.writer.wait()  # for a checkpoint on its way to the disk
        time.sleep(4 * self.period)  # torchrun ends the others as soon as one leaves

    def report(self, hang: hangs.Hang | None):
        """In files, then on the screen; without one, this rank's stacks alone."""
        folder = self.run_dir and self.run_dir.path
        if folder and folder.is_dir():
            self.write_report(folder, hang)
        if hang:
            where = f"; the stacks of all ranks are in {folder / 'stacks'}" if folder else ""
            begin, end = "train.py: failed", "--auto_resume continues from the newest checkpoint"
            if self.alone:
                begin, end = "warning", "it is left alone, as no other process waits for it"
            alert(f"{begin}: no progress: {hang.headline}{where}; {end}\n{hang.table}")

    def write_report(self, folder: Path, hang: hangs.Hang | None):
        step, phase, _ = self.where
        with contextlib.suppress(OSError):
            if hang:
                row = {"step": step, "hang": hang.headline, "hang_code": hang.code,
                       "hang_ranks": hang.blamed}
                with open(folder / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")
            (folder / "stacks").mkdir(exist_ok=True)
            with open(folder / "stacks" / f"rank_{self.rank}.txt", "a") as file:
                print(f"\n{time.strftime('%F %T')}: step {step}, in {phase} for "
                      f"{duration(self.age)}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
