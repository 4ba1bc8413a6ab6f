"""`python -m benchmarks NAME [arguments]`; without a name, what there is."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path


def main() -> None:
    folder = Path(__file__).parent
    programs = {p.stem: p for p in folder.glob("*.py") if not p.stem.startswith("_")}
    programs |= {p.parent.name: p for p in folder.glob("*/__main__.py")}
    if len(sys.argv) < 2 or sys.argv[1] not in programs:
        for name, path in sorted(programs.items()):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            print(f"{name:10} {docstring.splitlines()[0]}")
        sys.exit(0 if len(sys.argv) < 2 else 2)
    del sys.argv[0]
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
