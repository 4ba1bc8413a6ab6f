"""`python -m s3kv.io`: the I/O process, started by `s3kv.io.child`; not for use by hand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from functools import partial

import uvloop

from s3kv.host.slab import Slab
from s3kv.io.process_log import log_to_worker
from s3kv.io.server.process import serve
from s3kv.stores.s3.s3_store import open_store

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Serve until the worker hangs up. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m s3kv.io")
    for name in ("--fd", "--slab-fd", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    # Ctrl-C and systemd's stop reach every process at once. Only the worker acts on them: it may
    # first need its chunks uploaded. This process ends when the worker is gone.
    for number in _HANDLED:
        # Not SIG_IGN, which the helper programs of credentials would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    log_to_worker()
    sock = socket.socket(fileno=arguments.fd)
    slab = Slab.attach(arguments.slab_fd)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    make_store = partial(open_store, keeps_ready=True)
    loop.run_until_complete(serve(sock, slab, make_store, parent_pid=arguments.parent_pid))
    return 0


if __name__ == "__main__":
    status = main()
    # No interpreter shutdown: it would wait for name look-ups that hang in their threads.
    with contextlib.suppress(OSError):  # the worker, which reads this, has ended
        sys.stderr.flush()
    os._exit(status)
