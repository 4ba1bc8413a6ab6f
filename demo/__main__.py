"""Start of both demos: `python -m demo [--keep]`, and `python -m demo chat [--short]`.

It imports what they need within `main`, so that Ctrl-C in the first moments is met there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType

_WITHOUT_VLLM = (
    "vLLM is not installed in this environment: it needs Linux and Python 3.11 or later. "
    "Run `make clean`, then `make demo PYTHON=python3.11`"
)
_INTERRUPTED = "Interrupted. Nothing of it is left running.\n"


def main(arguments: list[str]) -> int:
    """Run the demo that the arguments name; its exit status, 2 without vLLM, or 130 on Ctrl-C and
    SIGTERM."""
    if find_spec("vllm") is None:
        print(_WITHOUT_VLLM, file=sys.stderr)
        return 2
    try:
        _on_interrupt(_leave)  # torch and numpy swallow a KeyboardInterrupt while they are imported
        from demo import chat, restart
        from lab.engine import Engine, EngineFailed
        from lab.zygote import Zygotes

        _on_interrupt(signal.default_int_handler)
        Engine.zygotes = Zygotes()
        try:
            if arguments[:1] == ["chat"]:
                return chat.main(arguments[1:])
            return restart.main(arguments)
        except EngineFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        finally:
            Engine.zygotes.close()
    except KeyboardInterrupt:
        sys.stderr.write(_INTERRUPTED)
        return 130


def _on_interrupt(handler: Callable[[int, FrameType | None], object]) -> None:
    """Meet Ctrl-C and SIGTERM alike."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(*_: object) -> None:
    """End at once: nothing runs yet that would have to be ended first."""
    os.write(2, _INTERRUPTED.encode())
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
