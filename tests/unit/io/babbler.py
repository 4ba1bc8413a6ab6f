"""Run in place of the I/O process: talks nonsense and stays."""

from __future__ import annotations

import signal
import socket
import sys

if __name__ == "__main__":
    socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1])).send(b"\xff" * 8)
    signal.pause()
