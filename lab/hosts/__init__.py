"""Hosts within this machine, for engines that span several: `with hosts("one", "two") as them`.

Each has its own network, process numbers, name and /dev/shm (Linux namespaces), so that ranks on
two of them reach each other by the network alone. The file system is the machine's, but for /mnt.
Wants root, and the programs `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lab.engine import ENVIRONMENT, ROOT

PATH = Path(__file__).resolve().parent / "path"
LINK = "eth0"
RAY_PORT = 6379

# The first process of a host: it says when the host is up, and adopts orphaned processes.
_INIT = """
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /mnt && hostname "$0" && echo up || exit 1
while :; do sleep 1; done
"""


class Host:
    """One host. `address` is its only one beside the loopback's."""

    def __init__(self, name: str, bridge: str, address: str) -> None:
        self.name, self.address = name, address
        self._bridge = bridge
        self._link = f"{bridge}-{address.rpartition('.')[2]}"
        self._first: psutil.Process | None = None

    def start(self) -> None:
        """Boot the host: its link is up, and nothing runs on it."""
        separate = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        self._parent = subprocess.Popen(
            [*separate, "--mount-proc", "sh", "-c", _INIT, self.name],
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
        )
        assert self._parent.stdout is not None
        assert self._parent.stdout.readline() == b"up\n", f"{self.name} does not start"
        (self._first,) = psutil.Process(self._parent.pid).children()
        inner = f"{self._link}-in"
        _ip(f"link add {self._link} type veth peer name {inner}")
        _ip(f"link set {self._link} master {self._bridge} up")
        _ip(f"link set {inner} netns {self._first.pid} name {LINK}")
        for command in (f"addr add {self.address}/24 dev {LINK}", f"link set {LINK} up"):
            self.run(["ip", *command.split()])
        self.run(["ip", "link", "set", "lo", "up"])

    def kill(self) -> None:
        """Cut the power: every process is killed, and the link is gone. Idempotent."""
        if self._first is None:
            return
        processes = [*self.processes(), self._first]
        _ip(f"link del {self._link}")
        self._parent.kill()  # and the kernel kills the first process, and with it all others
        _, left = psutil.wait_procs(processes, timeout=30)
        assert not left, f"{self.name} still runs {left}"
        self._parent.wait()
        assert self._parent.stdout is not None
        self._parent.stdout.close()
        self._first = None

    def cut(self) -> None:
        """Take the link down: whatever is sent to the host or from it is lost."""
        _ip(f"link set {self._link} down")

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one on the host, from outside."""
        assert self._first is not None
        entered = ["nsenter", f"--target={self._first.pid}", "--net", "--mount", "--uts", "--pid"]
        return [*entered, "--wd", "--", *command]

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Run a command on the host to its end, and return its output."""
        done = subprocess.run(
            self.command(command), env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def launch(
        self, command: Sequence[str], env: Mapping[str, str], log_path: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in a session of its own. Its output goes to `log_path`."""
        with log_path.open("ab") as log:
            return subprocess.Popen(
                self.command(command), env=env, stdout=log, stderr=log, start_new_session=True
            )

    def interpreter(self, directory: Path) -> str:
        """Python on this host, as `Engine` takes it: a program made in `directory`. It is no longer
        valid when the host has been started again."""
        program = directory / f"python-{self.name}"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(self.command([sys.executable]))} "$@"\n')
        program.chmod(0o755)
        return str(program)

    def environment(self) -> dict[str, str]:
        """The variables by which a vLLM process on this host finds the others."""
        return {"VLLM_HOST_IP": self.address, "GLOO_SOCKET_IFNAME": LINK}

    def processes(self) -> list[psutil.Process]:
        """Every living process of the host, but for its first."""
        assert self._first is not None
        here = _numbers(self._first.pid)
        return [
            process
            for process in psutil.process_iter()
            if process != self._first and _numbers(process.pid) == here
        ]


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts on a network of their own, on which the machine itself has the address that ends with
    1. They and everything that runs on them end with the block."""
    number = os.getpid() % 250
    bridge, network = f"lab{number}", f"10.213.{number}"
    _ip(f"link add {bridge} type bridge")
    them = [Host(name, bridge, f"{network}.{n}") for n, name in enumerate(names, start=2)]
    try:
        _ip(f"addr add {network}.1/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for host in them:
            host.start()
        yield them
    finally:
        for host in them:
            host.kill()
        _ip(f"link del {bridge}")


def gateway(host: Host) -> str:
    """The machine's own address on the network of a host."""
    return host.address.rpartition(".")[0] + ".1"


def platform() -> str:
    """The name of the platform that vLLM loads for engines and workers on Ray."""
    return "lab.hosts.platform.CpuOnRay"


def on_ray() -> dict[str, str]:
    """The variables with which an engine, and every node of its cluster, use Ray on a CPU."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PATH)]), "RAY_USAGE_STATS_ENABLED": "0"}


def start_ray(them: Sequence[Host]) -> str:
    """Make the hosts a Ray cluster of one device each, and return its address. The first is its
    head. Nodes know no credentials and no store."""
    address = f"{them[0].address}:{RAY_PORT}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    for host in them:
        place = ["--head", f"--port={RAY_PORT}", "--temp-dir=/mnt/ray", "--include-dashboard=false"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"),
            *(place if host is them[0] else [f"--address={address}"]),
            *(f"--node-ip-address={host.address}", "--num-cpus=1", "--num-gpus=1"),
            "--object-store-memory=100000000",
        ]
        host.run(command, inherited | ENVIRONMENT | on_ray() | host.environment())
    return address


def _numbers(pid: int) -> str | None:
    """The namespace that a process has its number in."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
