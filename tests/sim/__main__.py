"""`python -m tests.sim SEED [--trace]` replays one run; `python -m tests.sim FIRST COUNT` many."""

from __future__ import annotations

import sys

from tests.sim.runs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
