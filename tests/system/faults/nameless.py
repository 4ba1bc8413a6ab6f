"""The I/O process where one name cannot be resolved while a file exists; runs as a module."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop

from s3kv.io.__main__ import main

NAME = "localhost"
VARIABLE = "S3KV_TEST_NAMELESS"
"""The file that exists while the name cannot be resolved."""


class _Loop(uvloop.Loop):
    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        if host == NAME and Path(os.environ[VARIABLE]).exists():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        host = "127.0.0.1" if host == NAME else host
        return await super().getaddrinfo(host, port, **options)


if __name__ == "__main__":
    uvloop.new_event_loop = _Loop  # type: ignore[assignment]
    status = main()
    sys.stderr.flush()
    os._exit(status)
