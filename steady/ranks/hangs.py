"""Why training stands still: what a rank can tell of itself, and what the notes of all say.

A note is a dict: step, phase, age and limit (seconds in that phase, and allowed), host, pid; and
where there is no progress, what `details` finds.
"""

import contextlib
import json
import multiprocessing.process
import os
from pathlib import Path

from steady.ranks.ranks import names
from steady.watch import proc
from steady.watch.sinks import OUTSIDE_PHASES, duration

HOUSE = Path(__file__).resolve().parents[2]
DEBUGGERS = ("pdb", "bdb", "debugpy", "pydevd", "_pydevd_bundle", "_pydevd_frame_eval",
             "_pydevd_sys_monitoring")
CHECKPOINTS = ("steady.checkpoints.writer", "steady.checkpoints.state")  # not its retries
COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")  # forward, backward
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<")
NEAR = 12  # innermost frames of a stack that say what it is doing; a debugger has some
STATES = {"T": "stopped", "t": "stopped", "D": "waiting for a disk", "Z": "dead", "": "dead"}

# --- what a rank can tell of itself ----------------------------------------------------------


def details(phase: str, stack: list, thread: int) -> dict:
    """Of a rank without progress. stack: as of Watchdog.stack; thread: its id in the kernel."""
    return dict(
        waits=waits(phase, stack),
        at=own_line(stack),
        disk=state_of("self", thread) == "D",
        workers=odd_workers(),
        groups=collectives(),
    )


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


def state_of(pid: int | str, thread: int | str = "") -> str:
    """The kernel's letter for what a process or one of its threads does; "" if it is gone.

    R runs, S sleeps, D waits for a disk or another device, T is stopped, Z is dead.
    """
    fields = proc.stat_fields(pid, thread) or ["" if Path("/proc/self").exists() else "S"]
    return fields[0]


def odd_workers() -> list[str]:
    """Loader processes that cannot work, as "loader process 123 is stopped".

    From a private list, {} where it has changed: active_children() would wait for dead ones, which
    the loader itself does.
    """
    children = list(getattr(multiprocessing.process, "_children", ()))
    states = {child.pid: STATES.get(state_of(child.pid)) for child in children}
    return [f"loader process {pid} is {state}" for pid, state in states.items() if state]


def gone(notes: dict[int, dict]) -> dict[str, str]:
    """rank → "stopped" or "dead"; notes: of ranks on this host."""
    states = {str(rank): STATES.get(state_of(note["pid"])) for rank, note in notes.items()}
    return {rank: state for rank, state in states.items() if state in ("stopped", "dead")}


def collectives() -> dict[str, list]:
    """group → [collectives entered, number and kind of the oldest that is not done].

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
    """Ranks that have sent no notes: stopped, dead, stuck with Python's lock, or out of reach.

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
            why = "not responding (native code holding the GIL?)"
        else:
            why = "out of reach: its host or the network to it is gone"
        verb = "is" if len(ranks) == 1 else "are"
        lines.append(f"{names(ranks)} (host {note['host']}) {verb} {why}; last heard "
                     f"{duration(silent[ranks[0]])} ago, in {place(note)}")
    return "; ".join(lines)


def describe_waiting(notes: dict[int, dict]) -> str:
    """Where every rank waits for others: which of them is elsewhere in the program, if any."""
    ranks = sorted(notes)
    first = notes[ranks[0]]
    since = f"all have waited for {duration(first['age'])} in step {first['step'] + 1}"
    doing = {rank: pending(note) + f" at {note['at']}" * bool(note["at"])
             for rank, note in notes.items()}
    if disagree(notes):
        places = {}
        for rank in ranks:
            places.setdefault(json.dumps(notes[rank]["groups"], sort_keys=True), []).append(rank)
        # the fewest ranks; of as many, whoever left something out has come further
        odd = min(places.values(), key=lambda each: (len(each), -entered(notes[each[0]])))
        other = next(each[0] for each in places.values() if each is not odd)
        verb, it, have = ("is", "it", "has") if len(odd) == 1 else ("are", "they", "have")
        return (f"{names(odd)} (host {notes[odd[0]]['host']}) {verb} in {doing[odd[0]]} and others "
                f"in {doing[other]}: {it} {have} skipped a collective or made one more; {since}")
    hosts = len({note["host"] for note in notes.values()})
    where = f"the network between the {hosts} hosts" if hosts > 1 else "their connections"
    return f"all ranks are in {doing[ranks[0]]} and get no answer: check {where}; {since}"


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


def entered(note: dict) -> int:
    """How many collectives a rank has begun."""
    return sum(group[0] for group in note["groups"].values())


def pending(note: dict) -> str:
    """The collectives that a rank has entered and that are not done."""
    found = [kind for _, _, kind in note["groups"].values() if kind]
    return " and ".join(found) or "a collective"


def describe_lost(rank: int, note: dict, seconds: float) -> str:
    """Where a rank has been cut off from the others: it gets no answer from their store.

    That is in torchrun's own process, or in rank 0.
    """
    with_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = "torchrun's store" if with_torchrun else "the store, which is in rank 0,"
    why = "the network, or the host that the store is on, is gone"
    if not with_torchrun:
        state = note.get("gone", {}).get("0")  # known on its host alone
        why = (f"rank 0 is {state}" if state else
               "rank 0 is stopped or stuck, or its host or the network to it is gone")
    return (f"{describe_stuck([rank], note)}, and has had no answer from {store} for "
            f"{duration(seconds)}: {why}")


def ranks_behind(notes: dict[int, dict]) -> set[int]:
    """The ranks that have not entered a collective which others of its group have entered."""
    counts = {}  # group → {rank: how many it has entered}
    for rank, note in notes.items():
        for group, (count, _, _) in note["groups"].items():
            counts.setdefault(group, {})[rank] = count
    return {rank for each in counts.values() for rank, count in each.items()
            if count < max(each.values())}


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
