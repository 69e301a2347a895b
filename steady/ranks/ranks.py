"""The ranks of a run: how they meet, what rank 0 decides for all, numbers gathered from each."""

import contextlib
import os
import pickle
import re
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from steady.options import ConfigError, Failed


def rank_and_world() -> tuple[int, int, int, int]:
    """(rank, local rank, world size, local world size), as torchrun sets them.

    Raises ConfigError.
    """
    rank, local_rank = from_environment("RANK", 0), from_environment("LOCAL_RANK", 0)
    world_size = from_environment("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} in the environment: expected less than WORLD_SIZE, "
                          f"{world_size}; unset both to train in one process")
    return rank, local_rank, world_size, from_environment("LOCAL_WORLD_SIZE", 1)


def restart_count() -> int:
    """How many times torchrun has restarted its processes."""
    return from_environment("TORCHELASTIC_RESTART_COUNT", 0)


def from_environment(name: str, least: int) -> int:
    """A number that torchrun sets; the least one where it is not set. Raises ConfigError."""
    text = os.environ.get(name) or str(least)
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise ConfigError(f"{name}={text} in the environment: expected a number of at least "
                          f"{least}, as torchrun sets it; unset it to train in one process")
    return int(text)


@dataclass
class Ranks:
    """Which of the ranks this process is, where it computes, and how it reaches the others."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of autocast
    workers: int  # loader processes
    shards: object  # which part of the weights it holds: parallel.Shards
    stop: object  # signals, agreed by all: guard.faults.Stop
    watchdog: object
    micro_batch: int  # sequences in a forward pass
    group: object = None  # of gloo, so that no device is waited for; None: there are no others

    def __post_init__(self):
        enabled = self.dtype != torch.float32
        self.autocast = torch.autocast(self.device.type, self.dtype, enabled=enabled)
        self.scaler = self.shards.scaler(self.device.type, enabled=self.dtype == torch.float16)

    def broadcast(self, value):
        """Rank 0's value, on every rank."""
        box = [value]
        if self.group:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def minimum(self, number: int) -> int:
        """The smallest `number` of any rank."""
        box = torch.tensor(number)
        if self.group:
            dist.all_reduce(box, dist.ReduceOp.MIN, group=self.group)
        return int(box)


LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun",
             "PMI_SIZE": "mpiexec"}  # what each says of how many processes it has started


def refuse_lone_tasks():
    """Raise ConfigError where each of several processes would train the whole run by itself."""
    for name, launcher in LAUNCHERS.items():
        tasks = os.environ.get(name, "")
        if tasks.isdecimal() and int(tasks) > 1 and not os.environ.get("WORLD_SIZE"):
            raise ConfigError(f"{name}={tasks} in the environment, and no WORLD_SIZE: {launcher} "
                              f"has started {tasks} processes, and each would train the whole run "
                              "by itself. Let it start one torchrun on each host, as docs/slurm.sh "
                              f"does; to train in one process, unset {name}")


class RanksMissing(Failed):
    """Some ranks have not started."""

    of_one_rank = True


def meet(rank: int, world_size: int, patience: float):
    """The store of this attempt of all ranks, once they have come; None for one rank.

    Raises RanksMissing, which names the others, after `patience` seconds, and ConfigError.
    """
    if world_size == 1:
        refuse_lone_tasks()
        return None
    if not meet.store:
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError(f"WORLD_SIZE={world_size} in the environment, and no MASTER_ADDR: "
                              "expected torchrun to set both; unset it to train in one process")
        of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"], from_environment("MASTER_PORT", 1), world_size,
                timeout=timedelta(seconds=patience), is_master=rank == 0 and not of_torchrun,
                wait_for_workers=False, multi_tenant=True)
            beside = store.clone()  # now, while it is sure that the store is there
            attempt = come_together(store, rank, world_size, patience)
        except dist.DistError as e:
            raise RanksMissing(f"rank {rank} cannot reach the store through which all ranks meet: "
                               f"{str(e).splitlines()[0]}") from None
        meet.store, meet.beside = (dist.PrefixStore(attempt, each) for each in (store, beside))
    return meet.store


meet.store = meet.beside = None  # of this process; the watchdog has the second one to itself


def come_together(store, rank: int, world_size: int, patience: float) -> str:
    """The id of this attempt, made by rank 0, once every rank has it.

    torchrun keeps its store over restarts, and does not restart several hosts in step: there may be
    signs of processes that have died. So rank 0 answers all signs, and goes on once the process
    behind the newest sign of each rank has confirmed its answer. Whoever comes after that is the
    new process of a rank: the others have to be started again, too. Without torchrun, which has a
    port for each launch, it may as well be of another launch, which must not end this one.
    """
    mine, answered, deadline = os.urandom(8).hex(), set(), time.monotonic() + patience
    signs = [f"rank {each}" for each in range(world_size)]
    if rank == 0 and store.check(signs[:1]):
        store.set(f"{store.get(signs[0]).decode()}/{RESTARTED}", "0")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store.set(signs[rank], mine)
    elif store.compare_set(signs[rank], "", mine).decode() != mine:
        raise RanksMissing(f"rank {rank} is there already: if another launch has this MASTER_PORT, "
                           "choose another one; else start all ranks again")
    while time.monotonic() < deadline:
        if rank == 0 and store.check(signs):
            newest = [sign.decode() for sign in store.multi_get(signs)]
            for sign in set(newest) - answered:
                store.set(f"answer {sign}", mine)
            answered.update(newest)
            if store.check([f"{mine} {sign}" for sign in newest[1:]]):
                store.set(f"{mine} is complete", "")
                return mine
        elif rank and store.check([f"answer {mine}"]):
            attempt = store.get(f"answer {mine}").decode()
            store.set(f"{attempt} {mine}", "")
            return attempt
        elif rank and store.check(signs[:1]):
            attempt = store.get(signs[0]).decode()
            if store.check([f"{attempt} is complete"]):
                store.set(f"{attempt}/{RESTARTED}", str(rank))
        time.sleep(max(0.02, world_size / 5000))  # a thousand ranks ask 5,000 times a second
    missing = [each for each, sign in enumerate(signs) if not store.check([sign])]
    whom = rank_list(missing) if missing else "one that has died since"
    raise RanksMissing(f"rank {rank} has waited {patience:.0f} s for {whom} of {world_size} ranks "
                       "to start")


RESTARTED = "restarted"  # the key, among those of an attempt, with the rank that has a new process


def from_rank0(store, make):
    """What `make()` returns on rank 0, or its ConfigError, on every rank. Raises RanksMissing."""
    if store is None:
        return make()
    from_rank0.calls += 1
    rank, key = rank_and_world()[0], f"found {from_rank0.calls}"
    if rank == 0:
        try:
            found = make()
        except ConfigError as e:
            found = e
        store.set(key, pickle.dumps(found))
    try:
        while rank and not store.check([key]):
            if store.check([RESTARTED]):
                raise RanksMissing(was_restarted(store))
            time.sleep(0.02)
        found = pickle.loads(store.get(key))
    except dist.DistError as e:
        raise RanksMissing(f"rank {rank} has lost rank 0: {str(e).splitlines()[0]}") from None
    if isinstance(found, ConfigError):
        raise found
    return found


from_rank0.calls = 0  # in this process


def was_restarted(store) -> str:
    return f"rank {store.get(RESTARTED).decode()} was restarted, so all ranks have to be"


def say_once(text: str):
    """Print an error that the other ranks on this host may have, too. Then they may end."""
    rank, local_rank = (os.environ.get(name) or "0" for name in ("RANK", "LOCAL_RANK"))
    if rank != "0":
        time.sleep(1)  # rank 0 speaks first; torchrun ends the others as soon as one leaves
    is_first = local_rank == "0"
    with contextlib.suppress(Exception):  # the store may be gone, or not be there yet
        is_first = meet.store.add(f"{socket.gethostname()}: {text}", 1) == 1
    if is_first:
        print(text, file=sys.stderr, flush=True)
    if rank == "0" and meet.store:
        time.sleep(2)  # without torchrun the store ends with this process


def leave_group():
    if dist.is_initialized():
        dist.destroy_process_group()


LOST_CONNECTION = re.compile(
    "closed by peer|reset by peer|[Bb]roken pipe|remote process exited|communicator was aborted"
)


def lost_connection(e: Exception) -> bool:
    """Whether torch has lost its connection to another rank, which has the traceback that matters.

    Not the program itself to a server. gloo's are plain RuntimeErrors, which begin with the place
    in its source.
    """
    of_gloo = type(e) is RuntimeError and re.match(r"\[\S*gloo/transport/", str(e))
    return bool(LOST_CONNECTION.search(str(e)) and (of_gloo or isinstance(e, dist.DistError)))


FOR_EVER = timedelta(days=7)  # rank 0 may upload for hours; it is the watchdog that sees hangs


def join_ranks(store, rank: int, world_size: int, device: torch.device, patience: float):
    """Join the process group, if there are several ranks; its time-out exceeds `patience`.

    Returns a second group, of gloo; None for a single rank. Raises ConfigError.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if world_size == 1:
        return None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device.type}: expected one process, not {world_size}")
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # the flight recorder: see hangs.py
        join_ranks.calls += 1  # a later run in this process must not read old addresses
        store = dist.PrefixStore(f"run {join_ranks.calls}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size,
            device_id=device if cuda else None, timeout=timedelta(seconds=max(1800, 2 * patience)),
        )
    return dist.new_group(backend="gloo", timeout=FOR_EVER)


join_ranks.calls = 0  # in this process


def check_shard_size(shard_size: int, world_size: int):
    """Raise ConfigError if so many ranks are not a number of copies of a model on shard_size."""
    if shard_size and world_size > 1 and world_size % shard_size:
        raise ConfigError(f"--shard_size {shard_size}: expected a divisor of the {world_size} "
                          "processes")


def rank_list(ranks: list[int]) -> str:
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


def shared_notes(name: str):
    """A key-value store of all ranks, which a rank can read while others are stuck or gone."""
    return dist.PrefixStore(name, meet.store)


def all_gather(values: Tensor) -> Tensor:
    table = values.new_empty(dist.get_world_size(), len(values))
    dist.all_gather(list(table), values)
    return table
