"""The first moments of a demo."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from lab.engine import ROOT

INTERRUPTED_BY_AN_IMPORT = """
import os, sys, time

class Swallowing:
    def find_spec(self, name, path=None, target=None):
        if name != "demo.restart":
            return
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
            time.sleep(1)
        except KeyboardInterrupt:
            pass

sys.meta_path.insert(0, Swallowing())
from demo.__main__ import main
sys.exit(main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_cannot_swallow_an_interrupt(number: signal.Signals) -> None:
    command = [sys.executable, "-c", INTERRUPTED_BY_AN_IMPORT, str(int(number))]
    demo = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert demo.returncode == 130, demo.stderr
    assert demo.stderr == "Interrupted. Nothing of it is left running.\n"
