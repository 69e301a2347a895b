"""Notices that training stands still, says which rank is stuck, where and since when, and ends it.

A process alone, which torchrun will not restart, is only warned.

A second thread looks after the training thread and judges, a third swaps notes with the other
ranks through torchrun's store, where it may block as a network is gone. So they also run while
training is stuck in C++, in a collective, in I/O or in a loop. A step does nothing for them: they
read its number, and the phase from a clock if there is one. steady/ranks/hangs.py says
who is to blame.

A thread that keeps Python's lock for ever, as a loop in a C extension may, stops these two as well:
then the other ranks say so. One process alone does not notice.
"""

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from steady.ranks import hangs, ranks
from steady.watch.sinks import OUTSIDE_PHASES, duration

PATIENT = 6  # times --hang_seconds: in start-up, the first two steps, and between steps
SLOWER = 5  # times the longest that a phase has taken recently
FORGETS = 0.999  # of which so much is left with each look that finds it in another phase
LAST_WORDS = 10.0  # seconds in which files may still be written before the process ends

made = itertools.count()  # watchdogs of this process: --verify_resume needs two


def patience(hang_seconds: float) -> float:
    """Seconds that ranks wait for one another to start."""
    return PATIENT * hang_seconds or 1800


class Watchdog:
    """Watches the thread that makes it, until the end of its context; made on all ranks together.

    seconds: without progress that are always allowed; 0 is off.
    clock: the monitor's, which knows the phase; without one a step is one phase.
    """

    def __init__(self, seconds: float):
        self.rank, local_rank, self.world_size, local_size = ranks.rank_and_world()
        first = self.rank - local_rank
        self.on_this_host = range(first, first + local_size)
        self.informed = {0, min(1, self.world_size - 1), first}  # read all notes
        self.seconds, self.clock = seconds, None
        self.progress, self.first_step, self.run_dir, self.rescue = None, 0, None, None
        # nobody waits for it, and nobody would start it again: it is not ended
        restarts = ranks.from_environment("TORCHELASTIC_MAX_RESTARTS", 0)
        self.alone, self.reported = self.world_size == 1 and not restarts, None
        # a thousand ranks send four thousand notes a second to those of 128 hosts that read all
        self.period = max(min(1.0, seconds / 10), self.world_size / 256)
        self.quiet = 8 * self.period  # seconds without a note after which a rank counts as silent
        self.thread = threading.get_ident()
        self.where, self.age = (0, "start-up", 0.0), 0.0  # (step, phase, when it began)
        self.longest = {}  # phase → seconds it took recently
        self.awake = 0.0  # seconds, without those in which this process was stopped
        self.beat, self.notes, self.heard = 0, {}, {}  # rank → its newest note, and when it came
        self.kills, self.kills_read = hangs.out_of_memory_kills(), 0.0
        self.verdict, self.ended, self.store = None, threading.Event(), None
        self.mixed = False  # a rank left a collective out: sums may be of different steps
        number = next(made)
        self.beside = ranks.meet.beside
        if seconds and self.beside:
            self.store = dist.PrefixStore(f"watchdog {number}", self.beside)
            self.publish()
            threading.Thread(target=self.talk, name="watchdog", daemon=True).start()
            threading.Thread(target=self.look, name="watchdog", daemon=True).start()

    def follow(self, progress, run_dir, rescue):
        """From here on there is a run. rescue: () → saves its last step where the others are gone.

        Called again where the run goes back to a checkpoint, whose first steps take longer, too.
        """
        self.progress, self.first_step, self.run_dir = progress, progress.step + 1, run_dir
        self.rescue = rescue

    def __enter__(self):
        if self.seconds and not self.store:  # alone, it has nobody to wait for during start-up
            threading.Thread(target=self.look, name="watchdog", daemon=True).start()

    def __exit__(self, *error):
        self.ended.set()

    # --- this rank ---

    def look(self):
        """Every period: is there progress, and if not, which rank is to blame?"""
        before, warned = time.monotonic(), False
        while not self.ended.wait(self.period):
            now = time.monotonic()
            passed = min(now - before, 2 * self.period)  # more if it was stopped, or starved
            before, self.awake = now, self.awake + passed
            try:
                self.measure(passed)
                hang = self.judge() if self.verdict is None else None
            except Exception as e:  # such as a fork's notes: to go on looking matters more
                hang = None
                if not warned:
                    print(f"warning: the watchdog: {e!r}", file=sys.stderr, flush=True)
                warned = True
            if (hang or self.verdict) and not self.ended.is_set():
                self.end(hang)

    def measure(self, passed: float):
        """Count how long the training thread has been where it is."""
        where = self.where
        if self.progress:
            clock = self.clock
            phase = (clock.current, clock.since) if clock else ("training", 0.0)
            where = self.progress.step, *phase
        if where == self.where:
            if not hangs.in_debugger(self.stack()):
                self.age += passed
            return
        step, phase, _ = self.where
        if self.progress and step > self.first_step:
            self.longest[phase] = max(self.age, FORGETS * self.longest.get(phase, 0.0))
        self.where, self.age = where, 0.0
        if self.awake - self.kills_read > 60:  # earlier ones were not of what comes next
            self.kills, self.kills_read = hangs.out_of_memory_kills(), self.awake

    def limit(self) -> float:
        """Seconds that it may be there: more where compilation or files take their time."""
        step, phase, _ = self.where
        patient = not self.clock or step <= self.first_step or phase in OUTSIDE_PHASES
        patient = patient or self.age > self.seconds and hangs.takes_long(self.stack())
        least = self.seconds * (PATIENT if patient else 1)
        return max(least, SLOWER * self.longest.get(phase, 0.0))

    def stack(self) -> list[tuple[str, str, int, str]]:
        """(module, file, line, function) of the training thread's frames, the innermost first."""
        frame, found = sys._current_frames().get(self.thread), []
        while frame:
            code, module = frame.f_code, str(frame.f_globals.get("__name__"))
            found.append((module, code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return found

    def note(self) -> dict:
        """What the other ranks should know of this one; more once it makes no progress."""
        step, phase, _ = self.where
        note = dict(beat=self.beat, step=step, phase=phase, age=self.age, limit=self.limit(),
                    host=socket.gethostname(), pid=os.getpid(), ended=self.ended.is_set())
        if self.age > min(LAST_WORDS, self.seconds / 5):  # the rest takes milliseconds
            note |= hangs.details(phase, self.stack())
            note["gone"] = hangs.gone(self.neighbours())
            note["killed"] = hangs.out_of_memory_kills() > self.kills
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
        others = sorted(self.informed.union(self.on_this_host))
        if self.rank in self.informed:
            others = range(self.world_size)
        keys = [str(rank) for rank in others]
        if self.store.check(keys):  # else some have not come that far
            for rank, text in zip(others, self.store.multi_get(keys), strict=True):
                note = json.loads(text)
                if note["beat"] != self.notes.get(rank, {}).get("beat"):
                    self.heard[rank], self.notes[rank] = self.awake, note  # in this order: `end`
        if self.store.check(["verdict"]):
            self.mixed = self.store.check(["mixed"])
            self.verdict = self.store.get("verdict").decode()
        elif self.beside.check([ranks.RESTARTED]):
            self.verdict = ranks.was_restarted(self.beside)
            if self.rank == self.on_this_host[0]:
                print(f"train.py: failed: {self.verdict}", file=sys.stderr, flush=True)

    # --- the verdict ---

    def dead_neighbours(self) -> list[int]:
        """The ranks on this host that died while this one waits; gloo misses one in fifty."""
        if self.age <= min(LAST_WORDS, self.seconds):
            return []
        if not hangs.waits(self.where[1], self.stack()):
            return []
        running = {r: note for r, note in self.neighbours().items() if not note["ended"]}
        return [int(r) for r, state in hangs.gone(running).items() if state == "dead"]

    def judge(self) -> hangs.Hang | None:
        """Who is to blame; None while some rank may be making progress."""
        dead = self.dead_neighbours()
        if dead:
            notes = {rank: self.notes[rank] for rank in dead} | {self.rank: self.note()}
            return hangs.find(notes, {rank: self.awake - self.heard[rank] for rank in dead})
        if self.age <= self.limit():
            return None
        ended = {rank for rank, note in self.notes.items() if note["ended"]}
        notes = {rank: note for rank, note in self.notes.items() if rank not in ended}
        notes[self.rank] = self.note()
        silence = {rank: self.awake - self.heard.get(rank, 0.0) for rank in notes}
        if self.store and silence[self.rank] > self.quiet:  # not even its own notes come back
            return hangs.lost_store(self.rank, notes[self.rank], silence[self.rank])
        silent = {rank: seconds for rank, seconds in silence.items()
                  if seconds > self.quiet and rank != self.rank}
        for rank, note in notes.items():
            if rank in silent:  # even a rank that is busy with a checkpoint sends notes
                starts = note["phase"] == "start-up"
                waiting, limit = silent[rank], note["limit"] if starts else self.seconds
            else:
                waiting, limit = note["age"], note["limit"]
            if waiting <= limit:
                return None
        if self.rank not in self.informed and not self.informed <= ended.union(silent):
            return None  # they know more
        self.mixed = not silent and hangs.disagree(notes)
        return hangs.find(notes, silent)

    def last_signs(self) -> str:
        """After an error: what is known of the ranks and processes that are gone, or ""."""
        gone = hangs.gone(self.neighbours())
        lines = [f"rank {rank} is {state}" for rank, state in gone.items()]
        if hangs.out_of_memory_kills() > self.kills:
            lines.append("the kernel has killed a process on this machine for lack of memory")
        return "; ".join(lines)

    def end(self, hang: hangs.Hang | None):
        """Report it, once for all ranks, write this rank's stacks, and end the process.

        None: another rank has reported it.

        A rank that waits for others does so a little longer: when they are gone its collective
        fails, and the training thread saves the last step and ends in its own way. A process alone
        is left alone: it may be waiting for its user, as in input().
        """
        if self.alone:
            if self.where != self.reported:
                self.report(hang)
            self.reported = self.where
            return
        waits = hangs.waits(self.where[1], self.stack())
        words = threading.Thread(target=self.last_words, args=(hang,), daemon=True)
        words.start()
        words.join(LAST_WORDS)  # it may block, as where a disk does not answer
        for rank, note in self.neighbours().items():
            if self.awake - self.heard[rank] > self.quiet and not note["ended"]:
                with contextlib.suppress(OSError):  # stopped, or stuck: torchrun would wait 30 s
                    os.kill(note["pid"], signal.SIGKILL)
        left, saving = LAST_WORDS if waits else 0.0, self.seconds
        while left > 0 and saving > 0:
            time.sleep(self.period)
            if hangs.takes_long(self.stack()):
                saving -= self.period
            else:
                left -= self.period
        if waits and self.dead_neighbours() and self.rescue:
            # The collective cannot come to its end any more, so the weights stay what they are.
            rescuing = threading.Thread(target=self.rescue, daemon=True)
            rescuing.start()
            rescuing.join(self.seconds)  # a GPU may not answer
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stopped would stay
        os._exit(1)

    def last_words(self, hang: hangs.Hang | None):
        if hang and self.store:
            verdict = json.dumps({"rank": self.rank, **dataclasses.asdict(hang)})
            asking = threading.Thread(target=self.ask_to_speak, args=(verdict,), daemon=True)
            asking.start()
            asking.join(2 * self.period + 1)
            hang = hang if self.verdict in (None, verdict) else None
        self.report(hang)
        if self.run_dir and self.run_dir.writer:
            self.run_dir.writer.wait()  # for a checkpoint on its way to the disk
        time.sleep(4 * self.period)  # torchrun ends the others as soon as one leaves

    def ask_to_speak(self, verdict: str):
        """The first rank whose verdict is in the store prints it."""
        with contextlib.suppress(Exception):
            if self.mixed:
                self.store.set("mixed", "")
            self.verdict = self.store.compare_set("verdict", "", verdict).decode()

    def report(self, hang: hangs.Hang | None):
        """On the screen and in files; without one, this rank's stacks alone."""
        folder = self.run_dir and self.run_dir.path
        if hang:  # in a thread of its own: the screen may block, and so may the disk
            threading.Thread(target=self.say, args=(hang, folder), daemon=True).start()
        if folder and folder.is_dir():
            with contextlib.suppress(OSError):
                self.write_files(folder, hang)

    def say(self, hang: hangs.Hang, folder: Path | None):
        where = f"; the stacks of all ranks are in {folder / 'stacks'}" if folder else ""
        begin, end = "train.py: failed", "--auto_resume continues from the newest checkpoint"
        if self.alone:
            begin, end = "warning", "it is left alone, as no other process waits for it"
        print(f"{begin}: no progress: {hang.headline()}{where}; {end}\n{hang.table()}",
              file=sys.stderr, flush=True)

    def write_files(self, folder: Path, hang: hangs.Hang | None):
        step, phase, _ = self.where
        if hang:
            row = {"step": step, "hang": hang.headline(), "hang_code": hang.code,
                   "hang_ranks": hang.blamed}
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        (folder / "stacks").mkdir(exist_ok=True)
        with open(folder / "stacks" / f"rank_{self.rank}.txt", "a") as file:
            print(f"\n{time.strftime('%F %T')}: step {step}, in {phase} for "
                  f"{duration(self.age)}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
