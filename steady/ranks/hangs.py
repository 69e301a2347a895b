"""Why training stands still, judged from the notes of all ranks.

A note is a dict: step, phase, age and limit (seconds in that phase, and allowed), host, pid; and of
a rank without progress waits, at, groups and gone: see Watchdog.note.
"""

import contextlib
import json
from dataclasses import dataclass

from steady import private
from steady.ranks.ranks import rank_list
from steady.watch import proc
from steady.watch.findings import duration
from steady.watch.history import OUTSIDE_PHASES
from steady.watch.sampler import short, worth_naming

SLOW = ("steady.checkpoints.writer", "steady.checkpoints.state", "steady.checkpoints.checkpoint",
        "torch._dynamo.convert_frame", "torch._inductor.compile_fx")  # forward, backward
DEBUGGERS = ("bdb", "pydevd")  # of pdb and breakpoint(); of IDEs
NEAR = 12  # innermost frames of a stack to look at
STATES = {"T": "stopped", "t": "stopped", "Z": "dead"}

# --- the note of a rank ----------------------------------------------------------------------


def in_collective(stack: list) -> bool:
    """Whether it is inside torch.distributed. stack: of Watchdog.stack."""
    return any(module.startswith("torch.distributed.") for module, _, _, _ in stack[:NEAR])


def is_in(stack: list, modules: tuple) -> bool:
    return any(module in modules for module, _, _, _ in stack)


def own_line(stack: list) -> str:
    """The innermost line outside torch and the standard library."""
    lines = (f"{short(file)}:{line} in {function}" for _, file, line, function in stack
             if worth_naming(file))
    return next(lines, "")


def state_of(pid: int | str) -> str:
    """"stopped", "dead", or "" for a running process or without /proc."""
    if not proc.stat_fields("self"):
        return ""
    return STATES.get((proc.stat_fields(pid) or "Z")[0], "")


def gone(notes: dict[int, dict]) -> dict[str, str]:
    """rank → "stopped" or "dead", of those that are; notes: of ranks on this host."""
    return {str(rank): state for rank, note in notes.items() if (state := state_of(note["pid"]))}


def collectives() -> dict[str, list]:
    """Backend and group → [collectives entered, number of the oldest not yet done, its name].

    Such as "all_reduce of [7]"; 0 and "" if all are done. From PyTorch's flight recorder; {} if its
    format has changed.
    """
    found = {}
    with contextlib.suppress(Exception):
        for entry in private.flight_record():
            backend, _, collective = entry["profiling_name"].partition(":")
            group = f"{backend} {entry['process_group'][0]}"
            entered, (_, oldest, name) = entry["collective_seq_id"], found.get(group, (0, 0, ""))
            if not name and not entry["retired"]:
                sizes = " and ".join(map(str, entry["input_sizes"]))
                oldest, name = entered, f"{collective} of {sizes}"
            found[group] = [entered, oldest, name]
    return found


# --- judging the notes of all ----------------------------------------------------------------

HEADLINES = {  # code → the line about the ranks to blame, the gravest first
    "dead": "{who} {be} dead (if killed for lack of memory, dmesg says so)",
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
class Hang:
    """Why there is no progress. code: in HEADLINES; blamed: ranks; table: of all, those first."""

    code: str
    blamed: list[int]
    headline: str
    table: str


def find(notes: dict[int, dict], silent: dict[int, float]) -> Hang:
    """The ranks to blame; silent: rank → seconds since its last note."""
    known = {}
    for note in notes.values():
        known |= note.get("gone", {})
    answering = {note["host"] for rank, note in notes.items() if rank not in silent}
    states = {rank: known.get(str(rank)) or
              ("no answer" if notes[rank]["host"] in answering else "unreachable")
              for rank in silent}
    busy = [rank for rank in sorted(notes) if not notes[rank].get("waits")]
    if silent:
        code = min(states.values(), key=list(HEADLINES).index)
        blamed = sorted(rank for rank in silent if states[rank] == code)
    elif busy:  # on a GPU, ranks that wait may still fill its queue
        least = min(entered(notes[rank]) for rank in busy)
        code, blamed = "stuck", [rank for rank in busy if entered(notes[rank]) == least]
    else:
        blamed = odd_ones(notes)
        code = "mismatch" if blamed else "network"
    return describe(code, blamed, notes, silent, states)


def describe(code: str, blamed: list[int], notes: dict, silent: dict, states: dict) -> Hang:
    rows = {}  # (host, place, activity) → ranks
    for rank in sorted(notes, key=lambda rank: (rank not in blamed, rank not in silent, rank)):
        note = notes[rank]
        doing = f"{states[rank]}, last heard then" if rank in silent else activity(note)
        rows.setdefault((note["host"], place(note), doing), []).append(rank)
    cells = []
    for (host, where, doing), ranks in rows.items():
        seconds = silent.get(ranks[0], notes[ranks[0]]["age"])
        cells.append((rank_list(ranks), host, where, duration(seconds), doing))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    hosts = ", ".join(sorted({notes[rank]["host"] for rank in blamed}))
    be, have = ("is", "has") if len(blamed) == 1 else ("are", "have")
    headline = HEADLINES[code].format(who=f"{rank_list(blamed)} (host {hosts})", be=be, have=have,
                                      where=cells[0][2])
    return Hang(code, blamed, headline, table)


def activity(note: dict) -> str:
    """The activity of a rank that answers, from its note."""
    at = note.get("at", "")
    if not note.get("waits"):
        return at
    waited = " and ".join(name for _, _, name in note["groups"].values() if name)
    return f"waits in {waited or 'a collective'}" + f" at {at}" * bool(at)


def entered(note: dict) -> int:
    """How many collectives a rank has entered."""
    return sum(count for count, _, _ in note["groups"].values())


def odd_ones(notes: dict[int, dict]) -> list[int]:
    """Of ranks that all wait: the smallest group in the same collectives; [] if none differ.

    Between groups of equal size the one that is further on, since it left a collective out.
    """
    every, places = [note["groups"] for note in notes.values()], {}
    if not any(differ(one, two) for one in every for two in every):
        return []
    for rank in sorted(notes):
        places.setdefault(json.dumps(notes[rank]["groups"], sort_keys=True), []).append(rank)
    return min(places.values(), key=lambda ranks: (len(ranks), -entered(notes[ranks[0]])))


def differ(one: dict[str, list], two: dict[str, list]) -> bool:
    """Whether two ranks are in different collectives of the same number, or each lacks one that
    the other has begun. One that is merely further, as when a network fails, has begun them all.
    """
    pairs = [(one[group], two[group]) for group in one.keys() & two.keys()]
    if any(a[0] < b[0] for a, b in pairs) and any(a[0] > b[0] for a, b in pairs):
        return True
    return any(a[1] == b[1] and a[2] and b[2] and a[2] != b[2] for a, b in pairs)


def place(note: dict) -> str:
    step, phase = note["step"], note["phase"]
    if phase == "start-up":
        return phase
    between = phase in OUTSIDE_PHASES
    return f"{phase} after step {step}" if between else f"{phase} of step {step + 1}"
