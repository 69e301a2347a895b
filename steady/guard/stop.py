"""Signals become flags, and all ranks act on them at the same step."""

import os
import signal

import torch
import torch.distributed as dist

from steady.ranks.watchdog import start_thread
from steady.watch.sinks import alert

STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Stop:
    """SIGTERM, SIGHUP, SIGINT: save and stop; a second SIGINT stops at once. SIGUSR1: save.

    Ranks vote over gloo beside a step, and read the result before the next one.
    """

    def __init__(self, group=None, rank: int = 0):
        """group: of gloo, with all ranks; None for a single one."""
        self.signal, self.save = 0, False  # agreed by all ranks
        self.received = [0, 0]  # by this rank: a signal to stop, a signal to save
        self.group, self.rank, self.votes, self.vote = group, rank, None, None
        self.phase = lambda name: name  # or the monitor's, to time the wait for other ranks
        self.before = {}  # signal number → the handler that ours replaces

    def handle(self, number: int, frame):
        self.received[1 if number == signal.SIGUSR1 else 0] = number

    def requested(self) -> bool:
        """Whether to stop before the next step; called before each, on every rank."""
        # in one line without a call, so that a signal is either in this vote or in the next one
        mine, self.received = self.received, [self.received[0], 0]
        agreed = [0, 0] if self.group else mine
        if self.group:
            if self.vote:
                ended = self.phase("waiting")
                self.vote.wait()
                self.phase(ended)
                agreed = self.votes.tolist()
            if not agreed[0]:
                self.votes = torch.tensor(mine)
                self.vote = dist.all_reduce(self.votes, dist.ReduceOp.MAX, group=self.group,
                                            async_op=True)
        self.signal, self.save = agreed[0], bool(agreed[1])
        return self.signal != 0

    def asked(self, together: bool = False) -> bool:
        """Whether to interrupt work between two steps; together: a collective of all ranks."""
        if together:
            save = self.save
            self.requested()
            self.save |= save  # a save still to be made
        return bool(self.signal or not together and self.received[0])

    def __enter__(self):
        reader, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.pipe_before = signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        start_thread(self.attend, reader)
        for number in (*STOPPING, signal.SIGUSR1):
            if number == signal.SIGUSR1 or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                self.before[number] = signal.signal(number, self.handle)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.pipe_before)
        os.write(self.pipe, bytes(1))
        os.close(self.pipe)

    def attend(self, reader: int):
        """Answer the first signal, and end the process at a second Ctrl-C.

        In a thread woken by the interpreter's signals, even while the training thread is stuck.
        """
        first = 0
        while number := os.read(reader, 1)[0]:
            if first and number == signal.SIGINT:
                os._exit(128 + number)
            if not first and number in STOPPING:
                first = number
                alone = not self.group and number == signal.SIGINT  # torchrun hands on only one
                again = "; Ctrl-C again ends it at once" * alone
                if self.rank == 0:
                    alert(f"{signal.Signals(number).name}: stopping after this step{again}")
        os.close(reader)  # the context has ended
