"""Parts end in time, and none keeps another from its turn."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from scripts.gpu import parts
from scripts.gpu.parts import Part, run
from tests.waiting import wait_until


def part(name: str, program: str, **more: object) -> Part:
    return Part(name, ("-c", program), ("-c", "pass"), **{"timeout_s": 250.0, **more})  # type: ignore[arg-type]


def ends(out: Path, name: str = "first") -> dict[str, str]:
    report = json.loads((out / f"{name}.json").read_text())
    return {each: told["end"] for each, told in report["parts"].items()}


def test_every_part_has_its_turn_and_its_results(tmp_path: Path) -> None:
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('x'); print('said')"
    chain = [
        part("bad", "raise SystemExit(3)"),
        Part("good", ("-c", write, "{out}/good.txt"), (), 250.0, files=("good.txt",)),
        part("told", "print('{}')", stdout="told.json"),
    ]
    assert not run("first", [[part] for part in chain], tmp_path, os.environ, rehearse=False)
    assert ends(tmp_path) == {"bad": "failed with 3", "good": "ok", "told": "ok"}
    assert (tmp_path / "good.txt").read_text() == "x"
    assert (tmp_path / "told.json").read_text() == "{}\n"
    assert "said" in (tmp_path / "first.log").read_text()


def test_the_parts_of_a_stage_run_at_once_and_do_not_mix_what_they_say(tmp_path: Path) -> None:
    """Each waits for the other."""
    wait = (
        "import pathlib, sys, time\n"
        "mine, other = (pathlib.Path(sys.argv[1], name) for name in sys.argv[2:])\n"
        "mine.touch(); print(mine.name, 'begins', flush=True)\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "print(mine.name, 'ends')"
    )
    names = ("one", "two"), ("two", "one")
    stage = [Part(own, ("-c", wait, "{out}", own, other), (), 250.0) for own, other in names]
    assert run("first", [stage], tmp_path, os.environ, rehearse=False)
    assert ends(tmp_path) == {"one": "ok", "two": "ok"}
    log = (tmp_path / "first.log").read_text()
    assert all(f"{name} begins\n{name} ends" in log for name in ("one", "two"))


@pytest.fixture(autouse=True)
def _patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a part that hangs begins when it says so: Python may start very slowly."""
    ended, says = parts._ended, (tmp_path / "hangs").exists
    wait = partial(wait_until, "it hangs", says)
    monkeypatch.setattr(parts, "_ended", lambda p, s: (s < 1 and wait()) or ended(p, s))


def test_a_part_out_of_time_says_where_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    child = "import time; time.sleep(1000)"
    program = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)\n"
        "def it_hangs_here(): open('{out}/hangs', 'w'); time.sleep(1000)\n"
        "it_hangs_here()"
    )
    stages = [[part("hangs", program, timeout_s=0.5, stdout="pid")], [part("next", "pass")]]
    assert not run("first", stages, tmp_path, os.environ, rehearse=False)
    assert ends(tmp_path) == {"hangs": "not over in 0.5 s", "next": "ok"}
    assert "it_hangs_here" in (tmp_path / "first.log").read_text()
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_that_prints_no_stacks_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_STACKS_S", 0.1)
    program = (
        "import faulthandler, signal, time; faulthandler.disable()\n"
        "signal.signal(signal.SIGABRT, signal.SIG_IGN); open('{out}/hangs', 'w'); time.sleep(1000)"
    )
    stuck = part("stuck", program, timeout_s=0.5)
    assert not run("first", [[stuck]], tmp_path, os.environ, rehearse=False)
    assert ends(tmp_path) == {"stuck": "stuck for 0.5 s"}


def test_a_rehearsal_takes_the_other_program_and_its_time(tmp_path: Path) -> None:
    slow = part("slow", "raise SystemExit(3)", timeout_s=0.0)
    assert run("first", [[slow]], tmp_path, os.environ, rehearse=True)
    assert ends(tmp_path) == {"slow": "ok"}
