"""A worker as a process of its own, to be killed or interrupted by a test.

Arguments: endpoint, bucket, and what to do. Prints the I/O process's pid once it is ready, and
then whatever the deed tells.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from tests.unit.io import rig


def say(*words: object) -> None:
    print(*words, flush=True)


def sleep(client: IoClient, slab: Slab) -> None:
    time.sleep(600)


def fork_and_sleep(client: IoClient, slab: Slab) -> None:
    """Have another child hold a copy of the socket."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    time.sleep(600)


def upload_after_interrupt(client: IoClient, slab: Slab) -> None:
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    signal.signal(signal.SIGTERM, lambda *_: interrupted.append(True))
    say("waiting")
    while len(interrupted) < 2:
        time.sleep(0.01)
    rig.fill(slab, 1, number=1)
    client.submit(rig.upload(1))
    ended = []
    while not ended:
        ended = client.poll()
    say(ended[0].outcome.name, client.life.deaths)
    client.close()


def drain(client: IoClient, slab: Slab) -> None:
    for i in range(4):
        rig.fill(slab, i, number=i)
        client.submit(rig.upload(i))
    client.drain(200.0)


DEEDS: list[Callable[[IoClient, Slab], None]] = [
    sleep,
    fork_and_sleep,
    upload_after_interrupt,
    drain,
]


def main() -> None:
    endpoint, bucket, deed = sys.argv[1:]
    slab = Slab.create(8 * rig.SLOT_BYTES)
    config = Config(bucket=bucket, endpoint_url=endpoint, request_timeout_ms=400_000)
    client = IoClient(rig.handshake(config), slab)
    client.start()
    client.wait_ready(250.0)
    say(client.pid)
    {d.__name__: d for d in DEEDS}[deed](client, slab)


if __name__ == "__main__":
    main()
