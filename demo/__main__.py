"""Start of both demos: `python -m demo [--keep]`, and `python -m demo chat [--short]`.

It imports what they need within `main`, so that Ctrl-C in the first moments is met there.
"""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    """Run the demo that the arguments name; its exit status, or 130 on Ctrl-C."""
    try:
        from lab.engine import EngineFailed

        try:
            if arguments[:1] == ["chat"]:
                from demo import chat

                return chat.main(arguments[1:])
            from demo import restart

            return restart.main(arguments)
        except EngineFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        print("Interrupted. Nothing of it is left running.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
