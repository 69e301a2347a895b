"""Several hosts on one machine: Linux namespaces, joined by a switch. Needs root.

    with hosts(2) as (a, b):
        process = b.popen(torchrun(a, b, 1, ["train.py"], nnodes=2), cwd=..., stdout=...)
        b.cut_power()

Each host has its own network interfaces, hostname (host-a, host-b, …) and mounts. Nothing has a
name outside of them, and the kernel removes them with their last process.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import conftest

TOOLS = "unshare", "nsenter", "setpriv", "ip", "tc", "mount", "hostname"


@functools.cache
def available() -> bool:
    """Whether this process may make hosts."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        return False
    with contextlib.suppress(subprocess.SubprocessError), hosts(1):
        return True
    return False


class Namespaces:
    """Namespaces for network, hostname and mounts, which a sleeping process keeps alive."""

    def __init__(self, name: str, script: str = ""):
        """script: run inside, to set them up."""
        self.name = name
        hold = f"set -e; hostname {name}; ip link set lo up; {script}\necho; exec sleep infinity"
        self.holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount",
             "sh", "-c", hold], stdout=subprocess.PIPE, env=environment())
        if not self.holder.stdout.readline():
            raise subprocess.SubprocessError(f"{name}: namespaces cannot be made")
        self.net = self.inode(self.holder.pid)

    @staticmethod
    def inode(pid: int | str) -> str | None:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/net")

    def popen(self, command, env=None, **options) -> subprocess.Popen:
        """Start a command inside; its process id and signals are those of the command itself."""
        enter = ["nsenter", "--target", self.holder.pid, "--net", "--uts", "--mount",
                 "env", f"--chdir={options.pop('cwd', os.getcwd())}"]  # as seen from inside
        return subprocess.Popen([*map(str, enter), *map(str, command)],
                                env=environment(env), start_new_session=True, **options)

    def call(self, command: str) -> str:
        """What a shell command inside prints; it must succeed."""
        process = self.popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
        printed = process.communicate()[0]
        if process.returncode:
            raise subprocess.SubprocessError(f"{self.name}: {command}: exit {process.returncode}")
        return printed

    def pids(self) -> list[int]:
        """All processes inside."""
        numbers = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return [pid for pid in numbers if self.inode(pid) == self.net]

    def kill(self):
        """SIGKILL to everything inside, also what is forked meanwhile."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.holder.poll()
            time.sleep(0.01)
        self.holder.wait()
        self.holder.stdout.close()


class Host:
    def __init__(self, number: int, switch: Namespaces, files: Path, private: Path | None):
        self.name, self.address = f"host-{chr(97 + number)}", f"10.77.0.{number + 1}"
        self.mac = f"02:00:00:00:00:{number + 1:02x}"
        self.switch, self.port, self.boots = switch, "", 0
        self.script = f"mount --bind {files / 'hosts'} /etc/hosts"
        if private:
            disk = private.parent / f"{private.name}-{self.name}"
            disk.mkdir(exist_ok=True)
            self.script += f"; mount --bind {disk} {private}"
        self.boot()

    def boot(self):
        """Start it, also once more after its end."""
        self.boots += 1
        self.port = f"{self.name}.{self.boots}"  # the last one may not be gone yet
        self.inside = Namespaces(self.name, self.script)
        self.popen, self.call, self.pids = self.inside.popen, self.inside.call, self.inside.pids
        self.switch.call(
            f"ip link add {self.port} type veth peer name eth0 address {self.mac} "
            f"netns {self.inside.holder.pid} && ip link set {self.port} master switch up")
        self.call(f"ip address add {self.address}/24 dev eth0 && ip link set eth0 up")

    def kill(self):
        """SIGKILL to all its processes; the kernel closes their connections, which peers see."""
        self.inside.kill()

    def cut_power(self):
        """End it without a packet that would tell its peers."""
        self.switch.call(f"ip link set {self.port} down")
        self.kill()


@contextlib.contextmanager
def hosts(count: int, private: Path | None = None) -> Iterator[list[Host]]:
    """Make hosts with addresses 10.77.0.1 and so on, which find one another by name.

    private: a folder that each host sees as one of its own. All other files are shared.
    """
    made = []
    with tempfile.TemporaryDirectory() as folder:
        names = (f"10.77.0.{n + 1} host-{chr(97 + n)}\n" for n in range(count))
        (Path(folder) / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        if private:
            private.mkdir(exist_ok=True)
        try:
            switch = Namespaces("switch", "ip link add switch type bridge && ip link set switch up")
            made.append(switch)
            for number in range(count):
                made.append(Host(number, switch, Path(folder), private))
            yield made[1:]
        finally:
            for each in reversed(made):
                each.kill()


def environment(changes: dict | None = None) -> dict[str, str]:
    # With one store for all restarts (torch 2.13), the torchrun of a host that joins later waits in
    # vain for its address, and both end.
    return {**conftest.environment(), "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(changes or {})}


# of torch.distributed.elastic's rendezvous, in seconds, but for attempts
SHORT = dict(join_timeout=60, last_call_timeout=2, close_timeout=5, heartbeat_timeout=5,
             keep_alive_interval=1, keep_alive_max_attempt=3, read_timeout=20)


def torchrun(first: Host, host: Host, nproc: int, script, *, nnodes: str | int = 1,
             max_restarts: int = 0, more: list | tuple = ()) -> list[str]:
    """The command that runs `script`, a list of words, in nproc processes on `host`.

    first: the host of the rendezvous. more: options of torchrun that replace others.
    """
    options = {"is_host": int(host is first), **SHORT}
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}",
        f"--nproc_per_node={nproc}", f"--max_restarts={max_restarts}", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={first.name}:29400", "--rdzv_id=steady", "--monitor_interval=0.1",
        "--rdzv_conf=" + ",".join(f"{name}={value}" for name, value in options.items()),
        *map(str, more), "--", *map(str, script)]
