"""Why training stands still: what a rank can tell of itself, and what the notes of all say.

A note is a dict: step, phase, age and limit (seconds in that phase, and allowed), host, pid; and
where there is no progress, what `details` finds.
"""

import contextlib
import json
import multiprocessing
from pathlib import Path

from steady.limits import cgroup_folders
from steady.telemetry import OUTSIDE_PHASES, duration

HOUSE = Path(__file__).resolve().parent.parent
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugpy")
LEFT_OUT = "it has left out an exchange"
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<")

# --- what a rank can tell of itself ----------------------------------------------------------


def details(phase: str, stack: list, thread: int) -> dict:
    """Of a rank without progress. stack: as of Watchdog.stack; thread: its id in the kernel."""
    in_collective = any(file.endswith("distributed_c10d.py") for file, _, _ in stack[:6])
    return dict(
        waits=phase == "waiting" or in_collective,
        at=own_line(stack),
        disk=state_of("self", thread) == "D",
        workers=odd_workers(),
        groups=collectives(),
    )


def in_debugger(stack: list) -> bool:
    return any(file.endswith(DEBUGGERS) for file, _, _ in stack)


def in_checkpoint(stack: list) -> bool:
    return any(file.endswith("steady/checkpoint.py") for file, _, _ in stack)


def own_line(stack: list) -> str:
    """The innermost line that is not in a library, as "data.py:412 in read"."""
    for file, line, function in stack:
        if not any(part in file for part in LIBRARIES):
            path = Path(file)
            short = path.relative_to(HOUSE) if path.is_relative_to(HOUSE) else path.name
            return f"{short}:{line} in {function}"
    return ""


def state_of(pid: int | str, thread: int | str = "") -> str:
    """The kernel's letter for what a process or one of its threads does; "" if it is gone.

    R runs, S sleeps, D waits for a disk or another device, T is stopped, Z is dead.
    """
    path = Path(f"/proc/{pid}", *(["task", str(thread)] if thread else []), "stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self").exists() else "S"


def what_state(letter: str) -> str | None:
    return {"T": "stopped", "t": "stopped", "D": "waiting for a disk", "": "dead",
            "Z": "dead"}.get(letter)


def odd_workers() -> list[str]:
    """Loader processes that cannot work, as "loader process 123 is stopped"."""
    found = []
    for worker in multiprocessing.active_children():
        state = what_state(state_of(worker.pid))
        if state:
            found.append(f"loader process {worker.pid} is {state}")
    return found


def gone(notes: dict[int, dict], host: str) -> dict[str, str]:
    """rank → "stopped" or "dead", of the ranks on this host."""
    here = {rank: what_state(state_of(note["pid"])) for rank, note in notes.items()
            if note["host"] == host}
    return {str(rank): state for rank, state in here.items() if state in ("stopped", "dead")}


def collectives() -> dict[str, list]:
    """group → [collectives entered, the oldest that is not done, as text].

    From PyTorch's flight recorder, whose interface is private: {} where it has changed.
    """
    found = {}
    with contextlib.suppress(Exception):
        from torch._C import _distributed_c10d as c10d

        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            if not hasattr(c10d, name):
                continue
            trace = json.loads(getattr(c10d, name)(includeCollectives=True, onlyActive=False))
            for entry in trace.get("entries", []):
                entered, pending = found.get(entry["process_group"][0], (0, ""))
                if not pending and not entry["retired"]:
                    sizes = " and ".join(map(str, entry["input_sizes"]))
                    kind = entry["profiling_name"].partition(":")[2]
                    pending = f"{kind} of {sizes}"
                found[entry["process_group"][0]] = entry["collective_seq_id"], pending
    return {group: list(each) for group, each in found.items()}


def out_of_memory_kills() -> int:
    """Processes of this machine, or of this container, that the kernel killed for memory."""
    files = [folder / "memory.events" for folder in cgroup_folders("memory")]
    count = 0
    for path in [Path("/proc/vmstat"), *files]:
        with contextlib.suppress(OSError):
            lines = (line.split() for line in path.read_text().splitlines())
            count += sum(int(value) for name, value in lines if name == "oom_kill")
    return count


# --- what their notes say --------------------------------------------------------------------


def describe(notes: dict[int, dict], silent: dict[int, float]) -> str:
    """Which ranks are stuck, where and since when; silent: rank → seconds since its last note."""
    if silent:
        stuck, text = sorted(silent), describe_silent(notes, silent)
    else:
        behind = ranks_behind(notes)
        busy = [rank for rank in sorted(notes) if not notes[rank]["waits"]]
        stuck = [rank for rank in busy if rank in behind] or busy
        if not stuck:
            return describe_waiting(notes)
        text = "; ".join(describe_stuck(ranks, notes[ranks[0]]) for ranks in alike(stuck, notes))
    waiting = [rank for rank in sorted(notes) if rank not in stuck and notes[rank].get("waits")]
    if waiting:
        for_it = "it" if len(stuck) == 1 else "them"
        text += f"; {names(waiting)} wait{'s' * (len(waiting) == 1)} for {for_it}"
        text += f" in {pending(notes[waiting[0]])}"
    return text


def describe_stuck(ranks: list[int], note: dict) -> str:
    who = f"{names(ranks)} (host {note['host']}) {'has' if len(ranks) == 1 else 'have'}"
    text = f"{who} been in {place(note)} for {duration(note['age'])}"
    text += f", at {note['at']}" if note.get("at") else ""
    text += ", waiting for a disk" if note.get("disk") else ""
    return text + "".join(f"; {worker}" for worker in note.get("workers", []))


def describe_silent(notes: dict[int, dict], silent: dict[int, float]) -> str:
    """Of ranks that have sent no notes: stopped, dead, stuck with Python's lock, or out of reach.

    The ranks on the same host know which.
    """
    said = {}
    for note in notes.values():
        said |= {int(rank): state for rank, state in note.get("gone", {}).items()}
    killed = any(note.get("killed") for note in notes.values())
    heard_hosts = {note["host"] for rank, note in notes.items() if rank not in silent}
    lines = []
    for ranks in alike(sorted(silent), notes, lambda rank: said.get(rank)):
        note, state = notes[ranks[0]], said.get(ranks[0])
        if state == "stopped":
            why = "stopped (by SIGSTOP or a debugger)"
        elif state == "dead":
            why = "dead" + (": the kernel has killed a process for lack of memory" * killed)
        elif note["host"] in heard_hosts:
            why = "running without answering: stuck in code that keeps Python's lock"
        else:
            why = "out of reach: its host or the network to it is gone"
        verb = "is" if len(ranks) == 1 else "are"
        lines.append(f"{names(ranks)} (host {note['host']}) {verb} {why}; no sign for "
                     f"{duration(silent[ranks[0]])}, last in {place(note)}")
    return "; ".join(lines)


def describe_waiting(notes: dict[int, dict]) -> str:
    """Where every rank waits for others: which of them is elsewhere in the program."""
    since = f"all have waited for {duration(notes[0]['age'])}, step {notes[0]['step'] + 1}"
    places = {}
    for rank in sorted(notes):
        places.setdefault((notes[rank]["step"], notes[rank]["marks"]), []).append(rank)
    # the fewest ranks; of two places with as many, whoever left something out has come further
    odd = min(places, key=lambda place: (len(places[place]), [-n for n in place]))
    doing = {rank: pending(note) + f" at {note['at']}" * bool(note["at"])
             for rank, note in notes.items()}
    if len(places) > 1:
        rank = places[odd][0]
        other = next(each[0] for place, each in places.items() if place != odd)
        return (f"{names(places[odd])} (host {notes[rank]['host']}) is in {doing[rank]} and the "
                f"others are in {doing[other]}: {LEFT_OUT} or made one more; {since}")
    if len({pending(note) for note in notes.values()}) > 1:
        each = ", ".join(f"rank {rank} in {text}" for rank, text in sorted(doing.items()))
        return f"the ranks are in different exchanges: {each}; {since}"
    hosts = len({note["host"] for note in notes.values()})
    where = f"the network between the {hosts} hosts" if hosts > 1 else "their connections"
    return f"all ranks are in {doing[0]} and get no answer, {since}: {where}"


def pending(note: dict) -> str:
    """The exchanges that a rank has entered and that are not done."""
    found = [kind for _, kind in note["groups"].values() if kind]
    return " and ".join(found) or "an exchange"


def describe_lost(rank: int, note: dict, seconds: float) -> str:
    """Where a rank has been cut off from the others."""
    return (f"{describe_stuck([rank], note)}, and has had no answer from torchrun's store for "
            f"{duration(seconds)}: the network, or the host that the store is on, is gone")


def ranks_behind(notes: dict[int, dict]) -> set[int]:
    """The ranks that have not entered a collective which others of its group have entered."""
    entered = {}  # group → {rank: how many}
    for rank, note in notes.items():
        for group, (count, _) in note.get("groups", {}).items():
            entered.setdefault(group, {})[rank] = count
    return {rank for counts in entered.values() for rank, count in counts.items()
            if count < max(counts.values())}


def alike(ranks: list[int], notes: dict[int, dict], also=lambda rank: None) -> list[list[int]]:
    """The ranks in groups of one host, phase and step."""
    groups = {}
    for rank in ranks:
        note = notes[rank]
        key = note["host"], note["phase"], note["step"], also(rank)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def place(note: dict) -> str:
    if note["phase"] == "start-up":
        return "start-up"
    if note["phase"] in OUTSIDE_PHASES:
        return f"{note['phase']} after step {note['step']}"
    return f"{note['phase']} of step {note['step'] + 1}"


def names(ranks: list[int]) -> str:
    """[0, 1, 2, 5] → "ranks 0 to 2, 5"."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}"
                      for a, b in runs)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
