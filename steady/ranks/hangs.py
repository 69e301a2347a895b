"""Why training stands still: what a rank can tell of itself, and what the notes of all say.

A note is a dict: step, phase, age and limit (seconds in that phase, and allowed), host, pid; and
where there is no progress, what `details` finds.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from steady import private
from steady.ranks.ranks import rank_list
from steady.watch import proc
from steady.watch.sinks import OUTSIDE_PHASES, duration

HOUSE = Path(__file__).resolve().parents[2]
DEBUGGERS = ("pdb", "bdb", "debugpy", "pydevd", "_pydevd_bundle", "_pydevd_frame_eval",
             "_pydevd_sys_monitoring")
CHECKPOINTS = ("steady.checkpoints.writer", "steady.checkpoints.state",
               "steady.checkpoints.checkpoint")  # not .retry, through which data is read, too
COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")  # forward, backward
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<")
NEAR = 12  # innermost frames of a stack that say what it is doing; a debugger adds several
STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "": "dead"}

# --- what a rank can tell of itself ----------------------------------------------------------


def details(phase: str, stack: list) -> dict:
    """Of a rank without progress. stack: as of Watchdog.stack."""
    return dict(waits=waits(phase, stack), at=own_line(stack), groups=collectives())


def waits(phase: str, stack: list) -> bool:
    """Whether a rank is waiting for others."""
    near = [module for module, _, _, _ in stack[:NEAR]]
    return phase == "waiting" or "torch.distributed.distributed_c10d" in near


def in_debugger(stack: list) -> bool:
    return any(module.partition(".")[0] in DEBUGGERS for module, _, _, _ in stack[:NEAR])


def takes_long(stack: list) -> bool:
    """Whether it writes or reads a checkpoint, or compiles."""
    return any(module in (*CHECKPOINTS, *COMPILERS) for module, _, _, _ in stack)


def own_line(stack: list) -> str:
    """The innermost line that is not in a library, as "data.py:412 in read"."""
    for _, file, line, function in stack:
        ours = Path(file).is_relative_to(HOUSE)
        path = Path(file).relative_to(HOUSE) if ours else Path(file)
        if not any(part in str(path) for part in LIBRARIES):
            return f"{path if ours else path.name}:{line} in {function}"
    return ""


def state_of(pid: int | str) -> str:
    """The kernel's letter for what a process does; "" if it is gone.

    R runs, S sleeps, D waits for a disk or another device, T is stopped, Z is dead.
    """
    fields = proc.stat_fields(pid) or ["" if Path("/proc/self").exists() else "S"]
    return fields[0]


def gone(notes: dict[int, dict]) -> dict[str, str]:
    """rank → "stopped" or "dead"; notes: of ranks on this host."""
    states = {str(rank): STATES.get(state_of(note["pid"])) for rank, note in notes.items()}
    return {rank: state for rank, state in states.items() if state}


def collectives() -> dict[str, list]:
    """group → [collectives entered, number and kind of the oldest that is not done].

    From PyTorch's flight recorder; {} where what it records has changed.
    """
    found = {}
    with contextlib.suppress(Exception):
        for entry in private.flight_record():
            group = entry["process_group"][0]
            number = entry["collective_seq_id"]
            _, oldest, kind = found.get(group, (0, 0, ""))
            if not kind and not entry["retired"]:
                sizes = " and ".join(map(str, entry["input_sizes"]))
                oldest = number
                kind = f"{entry['profiling_name'].partition(':')[2]} of {sizes}"
            found[group] = [number, oldest, kind]
    return found


def out_of_memory_kills() -> int:
    """Processes of this machine, or of this container, that the kernel killed for memory."""
    events = [proc.read(folder / "memory.events") for folder in proc.cgroup_folders("memory")]
    lines = [line.split() for text in (proc.read("proc/vmstat"), *events)
             for line in text.splitlines()]
    return sum(int(value) for name, value in lines if name == "oom_kill")


# --- what their notes say --------------------------------------------------------------------

HEADLINES = {  # code → what is said of the ranks that are to blame, the gravest first
    "dead": "{who} {be} dead",
    "killed": "{who} {be} dead: the kernel has killed a process for lack of memory",
    "stopped": "{who} {be} stopped, by SIGSTOP or a debugger",
    "unreachable": "{who} {be} out of reach: the host or the network to it is gone",
    "no answer": "{who} {be} not responding (native code holding the GIL?)",
    "stuck": "{who} {be} stuck in {where}",
    "mismatch": "{who} {have} skipped a collective or called an extra one",
    "network": "all ranks wait for one another: check the network between the hosts",
    "store": "no answer from the store through which ranks meet: torchrun (or rank 0, without it) "
             "is gone, or its host, or the network",
}


@dataclass(frozen=True)
class Row:
    """Ranks of one host that are at the same place."""

    ranks: list[int]
    host: str
    where: str  # phase and step
    seconds: float  # there, or since they were last heard
    doing: str  # a line of the program, a collective, what is wrong


@dataclass(frozen=True)
class Hang:
    """Why there is no progress. blamed: ranks; rows: those of all ranks, the blamed ones first."""

    code: str  # in HEADLINES
    blamed: list[int]
    rows: list[Row]

    def headline(self) -> str:
        hosts = sorted({row.host for row in self.rows if set(row.ranks) & set(self.blamed)})
        who = f"{rank_list(self.blamed)} (host {', '.join(hosts)})" if self.blamed else ""
        be, have = ("is", "has") if len(self.blamed) == 1 else ("are", "have")
        return HEADLINES[self.code].format(who=who, be=be, have=have, where=self.rows[0].where)

    def table(self) -> str:
        cells = [(rank_list(row.ranks), row.host, row.where, duration(row.seconds), row.doing)
                 for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  " + "  ".join(map(str.ljust, each, widths)).rstrip() for each in cells)


def find(notes: dict[int, dict], silent: dict[int, float]) -> Hang:
    """Which ranks are to blame; silent: rank → seconds since its last note."""
    states = states_of_silent(notes, silent)
    busy = [rank for rank in sorted(notes) if not notes[rank].get("waits")]
    if silent:
        code = min(states.values(), key=list(HEADLINES).index)
        blamed = sorted(rank for rank in silent if states[rank] == code)
    elif busy:
        behind = ranks_behind(notes)
        code, blamed = "stuck", [rank for rank in busy if rank in behind] or busy
    elif disagree(notes):
        code, blamed = "mismatch", odd_ones(notes)
    else:
        code, blamed = "network", []
    return Hang(code, blamed, table_rows(notes, blamed, states, silent))


def lost_store(rank: int, note: dict, seconds: float) -> Hang:
    """A rank has been cut off from the others."""
    return Hang("store", [], [Row([rank], note["host"], place(note), seconds, doing(note))])


def table_rows(notes: dict[int, dict], blamed: list[int], states: dict[int, str],
               silent: dict[int, float]) -> list[Row]:
    groups = {}
    for rank in sorted(notes, key=lambda rank: (rank not in blamed, rank not in silent, rank)):
        note = notes[rank]
        said = f"{states[rank]}, last heard then" if rank in silent else doing(note)
        groups.setdefault((note["host"], place(note), said), []).append(rank)
    return [Row(ranks, host, where, silent.get(ranks[0], notes[ranks[0]]["age"]), said)
            for (host, where, said), ranks in groups.items()]


def doing(note: dict) -> str:
    """What a rank that answers is doing, as far as its note says."""
    at = note.get("at", "")
    if note.get("waits"):
        waited = " and ".join(kind for _, _, kind in note["groups"].values() if kind)
        return f"waits in {waited or 'a collective'}" + f" at {at}" * bool(at)
    return at


def states_of_silent(notes: dict[int, dict], silent: dict[int, float]) -> dict[int, str]:
    """The codes of ranks that send no notes: those on their host know whether they are stopped or
    dead, or else stuck with Python's lock; where a host is silent, they are out of reach."""
    known = {}
    for note in notes.values():
        known |= note.get("gone", {})
    if any(note.get("killed") for note in notes.values()):
        known = {rank: "killed" if state == "dead" else state for rank, state in known.items()}
    heard_hosts = {note["host"] for each, note in notes.items() if each not in silent}
    return {rank: known.get(str(rank)) or
            ("no answer" if notes[rank]["host"] in heard_hosts else "unreachable")
            for rank in silent}


def odd_ones(notes: dict[int, dict]) -> list[int]:
    """The smallest group of ranks that wait in the same collective; between groups of equal size
    the one that is further on, since it left a collective out."""
    places = {}
    for rank in sorted(notes):
        places.setdefault(json.dumps(notes[rank]["groups"], sort_keys=True), []).append(rank)
    return min(places.values(), key=lambda ranks: (
        len(ranks), -sum(group[0] for group in notes[ranks[0]]["groups"].values())))


def disagree(notes: dict[int, dict]) -> bool:
    """Whether all ranks wait in collectives, and not for the same ones in the same order.

    Two are in different ones that have the same number, or each lacks one that the other has begun.
    A rank that is merely further has begun all that the others have.
    """
    if not all(note.get("waits") for note in notes.values()):
        return False
    for one in notes.values():
        for two in notes.values():
            groups = one["groups"].keys() & two["groups"].keys()
            pairs = [(one["groups"][group], two["groups"][group]) for group in groups]
            if any(a[0] < b[0] for a, b in pairs) and any(a[0] > b[0] for a, b in pairs):
                return True
            if any(a[1] == b[1] and a[2] and b[2] and a[2] != b[2] for a, b in pairs):
                return True
    return False


def ranks_behind(notes: dict[int, dict]) -> set[int]:
    """The ranks that have not entered a collective which others of its group have entered."""
    counts = {}  # group → {rank: how many it has entered}
    for rank, note in notes.items():
        for group, (count, _, _) in note["groups"].items():
            counts.setdefault(group, {})[rank] = count
    return {rank for each in counts.values() for rank, count in each.items()
            if count < max(each.values())}


def place(note: dict) -> str:
    if note["phase"] == "start-up":
        return "start-up"
    if note["phase"] in OUTSIDE_PHASES:
        return f"{note['phase']} after step {note['step']}"
    return f"{note['phase']} of step {note['step'] + 1}"
