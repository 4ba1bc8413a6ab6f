"""A Ceph object gateway of our own, for the tests that must not trust a simulation.

`rgw_server()` starts one monitor, one object store daemon that keeps its data in memory, and the
gateway, all in the foreground under the calling process, without systemd, without cephx, on free
ports, in a directory of their own. About three seconds. Everything ends with the block, and with
the calling process however it ends.

Debian's packages: radosgw ceph-mon ceph-osd ceph-common.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.s3 import S3Server
from lab.service import answers, free_ports
from lab.weed import KEYS

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
KMS_KEY = "s3kv-key"
"""The id of a key for server-side encryption that the gateway has."""

# One copy of everything, four placement groups a pool, no warnings about either; and intervals
# that are seconds in a data centre shortened for a cluster that lives for a minute. The heartbeat
# grace is a day, in seconds, because the lease for reading is four fifths of it: a lone daemon
# whose lease runs out while the machine stands still may never serve a request again.
CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}/0]
mon initial members = a
public network = 127.0.0.0/8
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
run dir = {home}
admin socket = {home}/$name.$pid.asok
log file = {home}/$name.log
crash dir = {home}
log to stderr = false
debug none = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 0
paxos propose interval = 0.05
paxos min wait = 0.01
osd heartbeat grace = 86400
[mon.a]
host = localhost
mon data = {home}/mon
mon addr = 127.0.0.1:{mon_port}
[osd.0]
osd data = {home}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd class update on start = false
osd crush update on start = false
osd class load list = *
osd class default list = *
[client.rgw]
host = localhost
rgw data = {home}/rgw
rgw frontends = beast endpoint=127.0.0.1:{rgw_port}
rgw enable usage log = false
rgw enable ops log = false
rgw crypt require ssl = false
rgw crypt s3 kms backend = testing
rgw crypt s3 kms encryption keys = {kms_key}=YmluCmJvb3N0CmJvb3N0LWJ1aWxkCmNlcGguY29uZgo=
"""


def missing_programs() -> list[str]:
    """What `rgw_server` needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def rgw_server(home: Path, *, memory_bytes: int = 2 * 2**30) -> Iterator[S3Server]:
    """A gateway with an empty object store. `home` is an empty directory; logs stay there."""
    for name in ("mon", "osd", "rgw"):
        (home / name).mkdir()
    mon_port, rgw_port = free_ports(2)
    fsid = str(uuid.uuid4())
    configuration = CONFIGURATION.format(
        fsid=fsid,
        home=home,
        mon_port=mon_port,
        rgw_port=rgw_port,
        memory_bytes=memory_bytes,
        kms_key=KMS_KEY,
    )
    (home / "ceph.conf").write_text(configuration)
    cluster = _Cluster(home)
    try:
        cluster.start_monitor(fsid, mon_port)
        cluster.start_store()
        cluster.start_gateway(f"http://127.0.0.1:{rgw_port}/")
        yield S3Server(f"http://127.0.0.1:{rgw_port}", KEYS)
    finally:
        cluster.kill()


class _Cluster:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._configuration = ["-c", str(home / "ceph.conf")]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start_monitor(self, fsid: str, port: int) -> None:
        monmap = str(self._home / "monmap")
        address = f"[v1:127.0.0.1:{port}]"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        # Started by root, the daemons would become the user "ceph", who may not read our files.
        self._owner = ["--setuser", "root", "--setgroup", "root"] if os.getuid() == 0 else []
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, *self._owner)
        self._start("ceph-mon", "-i", "a", *self._owner)

    def start_store(self) -> None:
        identity = str(uuid.uuid4())
        self._ask_monitor("osd", "new", identity, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity, *self._owner)
        self._start("ceph-osd", "-i", "0", *self._owner)
        self._wait("the object store daemon", lambda: b"1 up" in self._ask_monitor("osd", "stat"))
        self._ask_monitor("osd", "crush", "add", "osd.0", "1", "root=default", "host=localhost")

    def start_gateway(self, url: str) -> None:
        self._start("radosgw", "-n", "client.rgw", *self._owner)
        self._wait("the gateway", lambda: answers(url))
        user = ["user", "create", "--uid=s3kv", "--display-name=s3kv", "--max-buckets=10000"]
        access = ["--access-key", KEYS["AWS_ACCESS_KEY_ID"]]
        secret = ["--secret-key", KEYS["AWS_SECRET_ACCESS_KEY"]]
        self._run("radosgw-admin", "-n", "client.rgw", *user, *access, *secret)

    def kill(self) -> None:
        for daemon in reversed(self._daemons):  # nothing is to be kept, so nothing is flushed
            daemon.kill()
            daemon.wait()

    def _ask_monitor(self, *command: str, attempts: int = 5) -> bytes:
        """The answer to a command that may be given twice. A busy monitor refuses some."""
        for _ in range(attempts - 1):
            self._check()
            with contextlib.suppress(RuntimeError):
                return self._run("ceph", "--connect-timeout", "30", *command)
            time.sleep(1)
        return self._run("ceph", "--connect-timeout", "30", *command)

    def _start(self, program: str, *arguments: str) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", program, "-f", *self._configuration]
        with (self._home / f"{program}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
            )

    def _run(self, program: str, *arguments: str) -> bytes:
        command = [program, *(self._configuration if program != "monmaptool" else []), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def _wait(self, what: str, ready: Callable[[], bool], timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            self._check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} does not start; logs: {self._home}")
            time.sleep(0.1)

    def _check(self) -> None:
        dead = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
        if dead:
            raise RuntimeError(f"ended: {dead}; logs: {self._home}")
