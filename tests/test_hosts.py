"""Several hosts, each a set of namespaces (tests/hosts.py), under the real torchrun."""

import re
import shlex
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT, TINY, TRAIN, column, saved, wait_for
from hosts import available, hosts, torchrun
from test_parallel import assert_equal_runs

FLAGS = [*TINY, "--log_interval", 1, "--save_interval", 4]

# They make as many steps as the test wants: 10, until the file `lost` is there; then those who are
# alone 10 more, until torchrun stops them to take another host in.
GATED = """
import os, time
import conftest, train
from steady.guard.stop import Stop
calls = []
def requested(self, *args):
    calls.append(1)
    alone = os.environ["WORLD_SIZE"] == "1"
    while len(calls) > 10 and not self.received[0] and (alone or not os.path.exists("lost")):
        time.sleep(0.01)
    return plain(self, *args)
plain, Stop.requested = Stop.requested, requested
train.process.run(train.main)
"""


@pytest.fixture(autouse=True)
def gated(tmp_path):
    if not available():
        pytest.skip("needs root, to make namespaces")
    (tmp_path / "gated.py").write_text(GATED)


pytestmark = pytest.mark.slow


class Launch:
    """torchrun on a host; what it and its processes print."""

    def __init__(self, first, host, folder, nproc, script, log="log", env=None, **options):
        self.log = folder / f"{host.name}.{log}"
        with open(self.log, "w") as file:
            self.process = host.popen(torchrun(first, host, nproc, script, **options), env,
                                      cwd=folder, stdout=file, stderr=subprocess.STDOUT)

    def ends_with(self, *codes):
        assert self.process.wait(120) in codes, self.log.read_text()
        return self.log.read_text()


@pytest.mark.parametrize("way, nproc", [("ddp", 2), ("zero3", 1)])
def test_two_hosts_train_as_one_process(run, corpus, tmp_path, way, nproc):
    flags = [*FLAGS, "--max_steps", 6, "--parallel", way]
    run(*flags, "--out_dir", "one")
    with hosts(2) as (a, b):
        launched = [Launch(a, host, tmp_path, nproc, [TRAIN, *flags, "--data", corpus,
                                                      "--out_dir", "two"], nnodes=2)
                    for host in (a, b)]
        for each in launched:
            each.ends_with(0)
    assert_equal_runs(tmp_path / "one", tmp_path / "two", rel=1e-5)


def assert_same_end(one, other):
    """The same losses and weights; the log of the step in which a host was lost may be missing."""
    expected, found = column(one, "train/loss"), column(other, "train/loss")
    assert len(found) >= len(expected) - 1
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), step
    expected, found = saved(one), saved(other)
    assert (found["step"], found["position"]) == (expected["step"], expected["position"])
    for name, tensor in expected["model"].items():
        assert torch.allclose(tensor, found["model"][name], rtol=0, atol=1e-4), name


@pytest.mark.parametrize("end, flags", [
    ("kill", []),
    pytest.param("cut_power", ["--hang_seconds", 5])])
def test_a_lost_host_is_done_without_and_taken_back(run, corpus, tmp_path, end, flags):
    run(*FLAGS, "--max_steps", 40, "--out_dir", "whole")
    script = ["gated.py", *FLAGS, *flags, "--data", corpus, "--max_steps", 40, "--out_dir", "r",
              "--auto_resume"]
    elastic = dict(nnodes="1:2", max_restarts=5)
    checkpoints = tmp_path / "r" / "checkpoints"
    with hosts(2) as (a, b):
        first = Launch(a, a, tmp_path, 1, script, **elastic)
        Launch(a, b, tmp_path, 1, script, **elastic)
        wait_for(checkpoints / "step_00000008.pt")
        getattr(b, end)()
        (tmp_path / "lost").touch()
        wait_for(checkpoints / "step_00000016.pt")
        b.boot()
        Launch(a, b, tmp_path, 1, script, log="again", **elastic).ends_with(0)
        told = first.ends_with(0)
    assert [line[:11] for line in told.splitlines() if line.startswith("device")] == [
        "device  2 x", "device  1 x", "device  2 x"]
    assert_same_end(tmp_path / "whole", tmp_path / "r")


# The first process of rank 1 is killed somewhere.
KILLED = """
import os, sys
where = sys.argv.pop(1)
def die(*args):
    open("killed", "w")
    os.kill(os.getpid(), 9)
victim = os.environ["RANK"] == "1" and not os.path.exists("killed")
if victim and where == "import":
    die()
import conftest, train
if victim:
    setattr(train, dict(data="load_data", step="update")[where], die)
train.process.run(train.main)
"""


@pytest.mark.parametrize("where, store", [
    ("import", "static"), ("data", "shared"), ("step", "own")])
def test_a_rank_of_the_second_host_is_killed(corpus, tmp_path, where, store):
    """Restarted, all go on with their run."""
    (tmp_path / "killed.py").write_text(KILLED)
    script = ["killed.py", where, *FLAGS, "--data", corpus, "--out_dir", "r", "--auto_resume"]
    env = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=str(int(store == "own")))
    static = ["--rdzv_backend=static", "--rdzv_endpoint=", "--master_addr=10.77.0.1",
              "--master_port=29511", "--node_rank"]
    with hosts(2) as (a, b):
        launched = [Launch(a, host, tmp_path, 1, script, env=env, nnodes=2, max_restarts=2,
                           more=[*static, number] if store == "static" else [])
                    for number, host in enumerate((a, b))]
        for each in launched:
            each.ends_with(0)
    # the log of the step in which it was killed may be missing
    assert list(column(tmp_path / "r", "train/loss"))[-11:] == list(range(2, 13))


def test_without_the_host_of_the_rendezvous_the_others_end(run, corpus, tmp_path):
    run(*FLAGS, "--max_steps", 20, "--out_dir", "whole")
    flags = [*FLAGS, "--data", corpus, "--max_steps", 20, "--out_dir", "r", "--auto_resume"]
    elastic = dict(nnodes="1:2", max_restarts=5)
    with hosts(2) as (a, b):
        Launch(a, a, tmp_path, 1, ["gated.py", *flags], **elastic)
        left = Launch(a, b, tmp_path, 1, ["gated.py", *flags], **elastic)
        wait_for(tmp_path / "r" / "checkpoints" / "step_00000008.pt")
        a.kill()
        (tmp_path / "lost").touch()
        told = left.ends_with(1)
        assert "another rank is gone" in told and "RendezvousConnectionError" in told
        Launch(b, b, tmp_path, 2, [TRAIN, *flags], log="again").ends_with(0)
    assert_same_end(tmp_path / "whole", tmp_path / "r")


def test_hosts_that_share_no_file_system(corpus, tmp_path):
    """Refused before the first step."""
    with hosts(2, private=tmp_path / "disk") as (a, b):
        told = [Launch(a, host, tmp_path, 1, [TRAIN, *FLAGS, "--data", corpus, "--max_steps", 20,
                                              "--out_dir", "disk/r"], nnodes=2)
                for host in (a, b)]
        one, other = (each.ends_with(1) for each in told)
    assert "not visible on host-b; expected a file system that all hosts share: mount" in other
    assert not re.search(r"step +\d+/20", one)


def test_the_command_for_kubernetes(run, corpus, tmp_path):
    """That of docs/kubernetes.yaml, with hosts as pods; a new one takes the evicted one's place."""
    run(*FLAGS, "--max_steps", 20, "--out_dir", "big")
    pod = [*yaml.safe_load_all((ROOT / "docs/kubernetes.yaml").read_text())][-1]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    flags = shlex.join([*map(str, FLAGS), "--data", str(corpus), "--max_steps", "20"])
    command = container["args"][0]
    for theirs, ours in (("train-0.steady", "host-a"), ("nproc_per_node=8", "nproc_per_node=1"),
                         ("/runs/big", "r"), ("--data /runs/data", flags), ("train.py", "gated.py"),
                         ("torchrun", f"{sys.executable} -m torch.distributed.run")):
        assert theirs in command
        command = command.replace(theirs, ours)

    def start(index):
        env = {each["name"]: each["value"] for each in container["env"]}
        with open(tmp_path / f"pod{index}.log", "a") as file:
            return pods[index].popen(
                [*container["command"], command], env | {"JOB_COMPLETION_INDEX": str(index)},
                cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)

    with hosts(2) as pods:
        processes = [start(0), start(1)]
        wait_for(tmp_path / "r" / "checkpoints" / "step_00000008.pt")
        processes[1].terminate()
        (tmp_path / "lost").touch()
        assert processes[1].wait(120) == 1  # what torchrun makes of the 143 of its processes
        processes[1] = start(1)
        assert [process.wait(120) for process in processes] == [0, 0]
    assert_same_end(tmp_path / "big", tmp_path / "r")
