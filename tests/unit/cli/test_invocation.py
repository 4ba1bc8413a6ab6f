"""How the command line takes settings, and what it says when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from s3kv.cli.__main__ import main
from s3kv.cli.app import cli
from s3kv.cli.invocation import parse, read_settings
from s3kv.config import Config
from s3kv.errors import ConfigError
from tests.project import ROOT
from tests.unit.cli.conftest import refused


@pytest.mark.parametrize("nest", [None, "kv_connector_extra_config", "ec_connector_extra_config"])
def test_what_comes_later_wins(tmp_path: Path, nest: str | None) -> None:
    file = tmp_path / "config.json"
    held = {"bucket": "file", "prefix": "file", "region": "file", "max_wait_ms": 5}
    file.write_text(json.dumps(held if nest is None else {"kv_role": "kv_both", nest: held}))
    config = parse(read_settings(file, {"prefix": "option", "region": None}, ["prefix=set"]))
    assert (config.bucket, config.prefix, config.region) == ("file", "set", "file")
    assert config.max_wait_ms == 5
    assert parse(read_settings(file, {"prefix": "option"}, [])).prefix == "option"


def test_the_settings_of_a_tier_alone_and_under_a_multi_connector(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    tier = {"type": "s3kv", "locality": "REMOTE", "bucket": "bkt", "max_wait_ms": 5}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}, tier]}
    several = {"connectors": [{"kv_connector": "x"}, {"kv_connector_extra_config": extra}]}
    for held in (extra, several):
        file.write_text(json.dumps({"kv_connector_extra_config": held}))
        assert parse(read_settings(file, {}, [])) == Config(bucket="bkt", max_wait_ms=5)


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        ("{}", [], "bucket is missing"),
        ("{}", ["bucket"], "NAME=VALUE"),
        ("{}", ["bucket=bkt", "hostbytes=1"], "did you mean 'host_bytes'"),
        ("[]", ["bucket=bkt"], "not a JSON object"),
        ("{", ["bucket=bkt"], "cannot be read as JSON"),
        ('{"secondary_tiers": 1}', ["bucket=bkt"], "unknown setting 'secondary_tiers'"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, given: list[str], said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        parse(read_settings(file, {}, given))


def start(code: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(more or {})
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


BUCKET = ["--bucket", "bkt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", *BUCKET, "--region", ""], "region is '': allowed is the name of a region"),
        (["ls", *BUCKET, "--set", f"ca_bundle={__file__}"], "allowed is a file of certificates"),
        (["cost", "--prefill-tokens-per-s", "inf"], "'inf' is not a finite number"),
        (["cost", "--price-get", "nan"], "'nan' is not a finite number"),
        (["cost", "--prefill-tokens-per-s", "0"], "not in the range"),
        (["doctor", *BUCKET, "--bandwidth", "5.1GiB"], "5.1 GiB: allowed is at most 5.0 GiB"),
    ],
)
def test_values_no_command_can_use_are_refused_before_anything_is_sent(
    arguments: list[str], said: str
) -> None:
    refused(CliRunner().invoke(cli, arguments, catch_exceptions=False), said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (MemoryError(), "there is not enough memory"),
    ],
)
def test_no_traceback_when_the_disk_or_the_memory_is_full(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**options: object) -> None:
        raise error

    monkeypatch.setattr("s3kv.cli.app.cli", fail)
    with pytest.raises(SystemExit, match="3"):
        main()
    assert capsys.readouterr().err == f"s3kv: {said}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["cost", "--over", "1h", "--stored", "1", "--metrics"]]
)
def test_a_reader_that_has_gone_is_no_finding(arguments: list[str], tmp_path: Path) -> None:
    (metrics := tmp_path / "metrics").write_text("vllm:s3kv_saves_total 1\n")
    code = "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
    code += f"sys.argv[1:] = {[*arguments, str(metrics)]}; import s3kv.cli.__main__ as m; m.main()"
    done = start(code)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_characters_that_the_locale_lacks_are_replaced() -> None:
    code = "import s3kv.cli.app as app, s3kv.cli.show as show, s3kv.cli.__main__ as m\n"
    code += "app.cli = lambda **options: show.print_grid([['\\u2192']]); m.main()"
    done = start(code, {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "?\n"), done.stderr


@pytest.mark.parametrize("package", ["click", "rich"])
def test_a_missing_package_is_named(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import s3kv.cli.__main__ as m; m.main()"
    done = start(code)
    assert done.returncode == 2
    told = f"the command line needs the package {package}: pip install 'vllm-s3kv[cli]'\n"
    assert done.stderr == told


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    main = "import s3kv.cli.__main__ as m; m.main()"
    script = start(main, {"_S3KV_COMPLETE": f"{shell}_source"})
    assert "_S3KV_COMPLETE" in script.stdout, script.stderr
    word = "do" if shell == "fish" else "1"  # fish says which word, the others which place
    asked = {"_S3KV_COMPLETE": f"{shell}_complete", "COMP_WORDS": "s3kv do", "COMP_CWORD": word}
    assert "doctor" in start(main, asked).stdout


INTERRUPTED_AT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Keyboard(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

import vllm_s3kv
sys.meta_path.insert(0, Keyboard())
sys.argv[1:] = ["ls", "--bucket", "bkt"]
vllm_s3kv.main()
"""


@pytest.mark.parametrize("module", ["importlib.metadata", "s3kv.cli.app", "botocore.session"])
def test_ctrl_c_while_it_starts(module: str) -> None:
    done = start(f"MODULE = {module!r}\n{INTERRUPTED_AT}")
    assert (done.returncode, done.stderr) == (130, "s3kv: interrupted\n")


def test_nothing_is_imported_before_ctrl_c_is_met() -> None:
    code = "import sys; had = {*sys.modules}; import vllm_s3kv; print(*{*sys.modules} - had)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) <= {"vllm_s3kv", "__future__"}


@pytest.mark.parametrize("command", ["ls", "verify", "doctor"])
def test_ctrl_c_while_the_bucket_is_silent(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        process = subprocess.Popen(
            [sys.executable, "-m", "s3kv.cli", command, "--bucket", "bkt", "--endpoint-url", url],
            cwd=ROOT, env=os.environ | keys, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        connection, _ = server.accept()
        with connection:
            # asyncio tells of an error of its own if it is cancelled in the turn that connects.
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate()
    assert process.returncode == 130
    assert told.split("\n") == ["", "s3kv: interrupted", ""]
