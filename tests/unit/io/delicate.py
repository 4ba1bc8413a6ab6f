"""Run in place of the I/O process: the real one, which dies of one chunk as soon as it has it."""

from __future__ import annotations

import os
import sys

from s3kv.io import __main__, wire
from s3kv.io.server.service import Service
from s3kv.messages import BucketJob
from tests.unit.io import rig

POISON = 7
"""The number of the chunk it dies of."""

receive = Service.receive


def dying(self: Service, message: wire.Down) -> None:
    receive(self, message)
    if isinstance(message, BucketJob) and message.key == rig.chunk(POISON):
        os._exit(3)


if __name__ == "__main__":
    Service.receive = dying  # type: ignore[method-assign]
    __main__.main()
    sys.stderr.flush()
    os._exit(0)
