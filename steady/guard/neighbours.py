"""Make room for other processes: OpenMP's threads stop spinning while cores are short.

torch's threads spin while they wait for one another. On free cores that is up to twice as fast as
sleeping; beside busy processes the thread that all wait for has no core, and steps take up to 20
times as long. GNU's OpenMP hardly spins while it has more threads than there are cores. So a second
team of threads, asleep, stops the spinning at any time; the work is shared as before.
"""

import os
import re
import threading
import time

from steady.watch import proc

CROWDED = 0.15  # of the time without a core: 0.00 to 0.04 alone, 0.33 or more beside one process
CHECK_SECONDS, FREE_SECONDS = 0.5, 3.0  # between checks, without and with a second team
TEAM = (os.cpu_count() or 1) + 1  # threads


def make_room():
    """Watch this process forever. Where it may start no thread, libgomp would end it."""
    while True:
        threads = proc.number("proc/loadavg", "/")  # of all: a limit counts all of the user's
        if crowded(CHECK_SECONDS) and proc.available_threads(threads) > TEAM:
            waiting = threading.Thread(target=wait_with_team, daemon=True)
            waiting.start()
            waiting.join()  # its team ends with it


def wait_with_team():
    """Keep more OpenMP threads than cores, if this torch has GNU's, until cores are free."""
    import ctypes

    for library in {*re.findall("/.*/libgomp.*", proc.read("proc/self/maps"))}:
        ctypes.CDLL(library).GOMP_parallel(ctypes.CDLL(None).free, None, TEAM, 0)  # free(NULL)
    while crowded(FREE_SECONDS):
        pass


def crowded(seconds: float) -> bool:
    """Whether the main thread, though ready to run, has no core in CROWDED of the next seconds."""
    began, before = time.monotonic(), proc.read("proc/self/schedstat").split()
    time.sleep(seconds)
    waited = int(proc.read("proc/self/schedstat").split()[1]) - int(before[1]) if before else 0
    return waited * 1e-9 > CROWDED * (time.monotonic() - began)
