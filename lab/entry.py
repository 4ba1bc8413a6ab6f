"""The first lines of an engine's process: `python -m lab.entry`.

They take stdout away before vLLM is imported, which may print meanwhile. What anything prints goes
to stderr, the log; answers alone go to what was stdout.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from typing import NoReturn


def run() -> NoReturn:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from lab.child import main

    asyncio.run(main(answers))
    end(0)


def end(code: int) -> NoReturn:
    """As any end, but for the two seconds in which an interpreter takes vLLM apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    run()
