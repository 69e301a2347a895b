"""The ranks of a run: meeting, decisions of rank 0, numbers gathered from all."""

import contextlib
import itertools
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from steady.options import ConfigError, Failed


def rank_and_world() -> tuple[int, int, int, int]:
    """(rank, local rank, world size, local world size) of torchrun. Raises ConfigError."""
    world_size = from_environment("WORLD_SIZE", 1)
    return (from_environment("RANK", 0, world_size - 1), from_environment("LOCAL_RANK", 0),
            world_size, from_environment("LOCAL_WORLD_SIZE", 1))


def from_environment(name: str, least: int, most: int = 65535) -> int:
    """A number set by torchrun; `least` if it is not set. Raises ConfigError."""
    text = os.environ.get(name) or str(least)
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text} in the environment: expected a number from {least} to "
                          f"{most}, as torchrun sets it; unset it to train in one process")
    return int(text)


@dataclass
class Ranks:
    """The rank of this process, its device, and its ways to reach the other ranks."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of autocast
    workers: int  # loader processes
    shards: object  # its part of the weights: parallel.Shards
    stop: object  # signals, agreed by all: guard.stop.Stop
    watchdog: object
    micro_batch: int  # sequences in a forward pass
    group: object = None  # gloo, so that it never waits for a device; None: a lone rank

    def __post_init__(self):
        enabled = self.dtype != torch.float32
        self.autocast = torch.autocast(self.device.type, self.dtype, enabled=enabled)
        self.scaler = self.shards.scaler(self.device.type, enabled=self.dtype == torch.float16)

    def broadcast(self, value):
        return broadcast(value, self.group)

    def require_same(self, option: str, fingerprint):
        """Raise ConfigError on a rank whose files have another fingerprint() than rank 0's."""
        found = fingerprint() if self.world_size > 1 else None
        if self.broadcast(found) != found:
            raise ConfigError(f"--{option}: rank {self.rank}, on {os.uname().nodename}, has other "
                              "files than rank 0; expected the same on all hosts")

    def minimum(self, number: int) -> int:
        """The smallest `number` of any rank."""
        box = torch.tensor(number)
        if self.group:
            dist.all_reduce(box, dist.ReduceOp.MIN, group=self.group)
        return int(box)


# --- meeting ---------------------------------------------------------------------------------

LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun",
             "PMI_SIZE": "mpiexec"}  # variable with the number of processes → launcher


def refuse_lone_tasks():
    """Raise ConfigError if several processes would each train the whole run."""
    for name, launcher in LAUNCHERS.items():
        tasks = os.environ.get(name, "")
        if tasks.isdecimal() and int(tasks) > 1 and not os.environ.get("WORLD_SIZE"):
            raise ConfigError(f"{name}={tasks} in the environment, and no WORLD_SIZE: each process "
                              f"of {launcher} would train the whole run. Let it start one torchrun "
                              f"on each host, as docs/slurm.sh does; else unset {name}")


stores = []  # the store of all ranks, once they have met
group_numbers = itertools.count()  # a second run here must not read the addresses of the first
PATIENT = 6  # times --hang_seconds: start-up, first steps, checkpoints, compilation, between steps
FOR_EVER = timedelta(days=7)  # rank 0 may upload for hours; the watchdog handles hangs


def meet(hang_seconds: float):
    """Join the process group, once all ranks have started; a lone process has none.

    Raises Failed if that takes PATIENT times hang_seconds, and ConfigError.
    """
    rank, _, world_size, _ = rank_and_world()
    patience = PATIENT * hang_seconds or 1800
    if world_size == 1:
        return refuse_lone_tasks()
    if dist.is_initialized():
        return
    if not stores:
        stores.append(join(rank, world_size, patience))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", rank=rank,
        world_size=world_size, timeout=timedelta(seconds=max(1800, 2 * patience)),
        store=dist.PrefixStore(f"group {next(group_numbers)}", stores[0]))


def join(rank: int, world_size: int, patience: float) -> dist.Store:
    """The store of this attempt to start, once every rank has joined it.

    torchrun keeps its store over restarts, and does not restart several hosts at once. So rank 0
    names each attempt and lists the processes in it; others wait for an attempt that lists them.
    """
    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise ConfigError(f"WORLD_SIZE={world_size} in the environment, and no MASTER_ADDR or no "
                          "MASTER_PORT; torchrun sets them; unset it to train in one process")
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    mine, deadline = os.urandom(8).hex(), time.monotonic() + patience
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], from_environment("MASTER_PORT", 1), world_size,
            timeout=timedelta(seconds=patience), is_master=rank == 0 and not of_torchrun,
            wait_for_workers=False, multi_tenant=True)
        if rank == 0:
            store.set("attempt", mine)
        keys = [str(each) for each in range(world_size)]
        while time.monotonic() < deadline:
            if store.check(["attempt"]):
                here = dist.PrefixStore(f"{store.get('attempt').decode()} of {world_size}", store)
                here.set(str(rank), mine)
                if rank == 0 and here.check(keys):
                    here.set("joined", b" ".join(here.multi_get(keys)))
                if here.check(["joined"]) and mine in here.get("joined").decode():
                    return here
            time.sleep(max(0.02, world_size / 5000))  # a thousand ranks ask 5,000 times a second
        missing = [int(each) for each in keys if rank == 0 and not here.check([each])] or [0]
    except dist.DistError as e:
        raise Failed(f"rank {rank} cannot reach the store through which all ranks meet: "
                     f"{str(e).splitlines()[0]}") from None
    raise Failed(f"rank {rank} has waited {patience:.0f} s for {rank_list(missing)} of "
                 f"{world_size} ranks to start")


def gloo_group(world_size: int, device: torch.device):
    """A gloo group, in addition to the default one, for messages that no GPU has to wait for.

    None for a single rank. Raises ConfigError for a device that several ranks cannot use.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device.type}: expected one process, not {world_size}")
    return dist.new_group(backend="gloo", timeout=FOR_EVER)


def leave_group():
    if dist.is_initialized():
        dist.destroy_process_group()


# --- messages --------------------------------------------------------------------------------


def from_rank0(make):
    """The result of `make()` on rank 0, or its ConfigError, on every rank."""
    found = None
    if rank_and_world()[0] == 0:
        try:
            found = make()
        except ConfigError as e:
            found = e
    found = broadcast(found)
    if isinstance(found, ConfigError):
        raise found
    return found


def broadcast(value, group=None):
    """Rank 0's value, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def say_once(text: str):
    """Print an error once, even if all ranks have it."""
    rank, local_rank = (os.environ.get(name) or "0" for name in ("RANK", "LOCAL_RANK"))
    if rank != "0":
        time.sleep(1)  # rank 0 speaks first; torchrun ends the others as soon as one leaves
    is_first = local_rank == "0"
    with contextlib.suppress(Exception):  # the store may be gone, or not be there yet
        is_first = stores[0].add(text, 1) == 1
    if is_first:
        print(text, file=sys.stderr, flush=True)
    if rank == "0" and stores:
        time.sleep(2)  # without torchrun the store ends with this process


def rank_list(ranks: list[int]) -> str:
    """[0, 1, 2] → "ranks 0, 1, 2"."""
    shown = ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# --- errors ----------------------------------------------------------------------------------

LOST_CONNECTION = re.compile("closed by peer|reset by peer|[Bb]roken pipe|remote process exited|"
                             "communicator was aborted")


def lost_connection(e: Exception) -> bool:
    """Whether torch lost its connection to another rank: the other one has the useful traceback.

    A connection to another server does not count. gloo's messages begin with a line of its source.
    """
    of_gloo = type(e) is RuntimeError and re.match(r"\[\S*gloo/transport/", str(e))
    return bool(LOST_CONNECTION.search(str(e)) and (of_gloo or isinstance(e, dist.DistError)))
