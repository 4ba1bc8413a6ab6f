"""`s3kv serve`: the command that it runs, for every kind of vLLM."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from s3kv.cli import serve
from s3kv.cli.app import cli
from s3kv.cli.doctor import host
from tests.project import ROOT, plant
from tests.unit.cli.conftest import refused

GPU, CPU = "0.32.0", "0.32.0+cpu"
MODELS = {
    "m": '{"architectures": ["Llama"], "sliding_window": null, "attention_chunk_size": null}',
    "images": '{"architectures": ["Llava"]}',
    "windows": '{"sliding_window": 128}',
    "unused": '{"sliding_window": 128, "use_sliding_window": false}',
    "local": '{"text_config": {"attention_chunk_size": 8192}}',
    "odd": "",
}
SET = ("--bucket", "my-bucket", "--host-bytes", "1GiB", "--no-encoder-outputs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which Python searches first for distributions. It has three models."""
    plant(tmp_path, {f"{name}/config.json": config for name, config in MODELS.items()})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "multi_modal_architectures", lambda: {"Llava"})
    monkeypatch.setattr(host, "SHM", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    return tmp_path


def install(folder: Path, version: str) -> None:
    """The distribution of a vLLM, without its code."""
    told = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    plant(folder, {"vllm-0.dist-info/METADATA": told})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *arguments], catch_exceptions=False)


def command(*arguments: str) -> tuple[list[str], dict[str, dict[str, Any]], list[str]]:
    """The words without those with JSON, the JSON by its option, and the notes."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    words, configs = document["command"], {}
    for name in ("--kv-transfer-config", "--ec-transfer-config"):
        if name in words:
            at = words.index(name)
            configs[name[2:4]] = json.loads(words[at + 1])
            del words[at : at + 2]
    return words, configs, document["notes"]


def tier(cpu_bytes: int, *settings: str, **more: Any) -> dict[str, Any]:
    """The configuration of vLLM's connector. settings: those of the tier, beside its bucket."""
    held = dict(setting.split("=") for setting in settings)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "offload_prompt_only": False,
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [{"type": "s3kv", "bucket": "my-bucket", **held}],
            **(more or {"blocks_per_chunk": 16}),
        },
    }


def own(**settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"bucket": "my-bucket", "host_bytes": "1GiB", **settings},
    }


@pytest.mark.parametrize(
    ("version", "arguments", "expected"),
    [
        (GPU, "", tier(2**30)),
        (GPU, "-tp 4 --pipeline_parallel_size=2", tier(8 * 2**30)),
        (GPU, "--block-size 64", tier(2**30, blocks_per_chunk=4)),
        (GPU, "--set chunk_tokens=512", tier(2**30, block_size=512)),
        (GPU, "--set share_ranks=true", tier(2**30, blocks_per_chunk=16, canonical_layout=True)),
        (GPU, "--prefix team --set model_id=m", tier(2**30, "prefix=team", "model_id=m")),
        (GPU, "--connector S3KVConnector", own()),
        (GPU, "--enable-lora", own()),
        (GPU, "--enable_prompt_embeds", own()),
        (GPU, "--scheduling-policy priority", own()),
        (GPU, "--scheduling-policy=fcfs", tier(2**30)),
        (CPU, "", own()),
        (CPU, "-tp 2 --set chunk_tokens=512", own(chunk_tokens=512)),
        (CPU, "--connector OffloadingConnector", tier(2**30)),
    ],
)
def test_the_connector_and_its_settings(
    folder: Path, version: str, arguments: str, expected: dict[str, Any]
) -> None:
    install(folder, version)
    _, configs, notes = command("m", *SET, *arguments.split())
    assert configs == {"kv": expected}
    assert notes == []


def test_a_note_names_what_killed_engines_have_left(folder: Path) -> None:
    install(folder, GPU)
    (folder / "vllm_offload_a.mmap").touch()
    *_, (note,) = command("m", *SET)
    assert f": rm {folder}/vllm_offload_a.mmap, unless an engine of another container" in note
    assert command("m", *SET, "--connector", "S3KVConnector")[2] == []


def test_options_of_vllm_are_passed_on_in_their_order(folder: Path) -> None:
    install(folder, CPU)
    given = ["--port", "8000", "-tp", "2", "--served-model-name=it's", "-O3", "--config", "c.yaml"]
    for arguments in (["m", *given, *SET], [*SET, "m", *given]):
        words, _, _ = command(*arguments)
        assert words[words.index("m") + 1 :] == ["--shutdown-timeout", "60", *given]
    words, _, _ = command("m", *SET, "--shutdown-timeout", "5")
    assert words[-2:] == ["--shutdown-timeout", "5"]
    assert words.count("--shutdown-timeout") == 1


def test_vllm_starts_without_its_script_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM's image /usr/bin has Python, and /usr/local/bin the script."""
    install(folder, GPU)
    monkeypatch.setattr(sys, "executable", str(folder / "python3"))
    module = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    assert command("m", *SET)[0][:5] == [*module, "serve", "m"]
    (folder / "vllm").touch()
    assert command("m", *SET)[0][:3] == [str(folder / "vllm"), "serve", "m"]


def test_the_command_is_printed_for_a_shell(folder: Path) -> None:
    install(folder, CPU)
    arguments = ["m", "--bucket", "my-bucket", "--served-model-name", "it's"]
    printed = run(*arguments, "--print")
    assert printed.exit_code == 0
    note, shown = printed.stdout.splitlines()
    assert note.startswith("# host memory: ")
    assert shlex.split(shown) == json.loads(run(*arguments, "--json").stdout)["command"]


def has_shm(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))


def test_shm_has_room_for_all_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder, GPU)
    given = ["m", "--bucket", "my-bucket", "--print"]
    has_shm(monkeypatch, 2**26)
    least = "at least 256.0 MiB for each of 1 worker: make /dev/shm larger: docker run"
    refused(run(*given), "has 64.0 MiB free", least, "; or add --connector S3KVConnector\n")
    assert run(*given, "--connector", "S3KVConnector").exit_code == 0
    has_shm(monkeypatch, 2**28)
    assert run(*given).exit_code == 0
    refused(run(*given, "-dp", "2"), "for each of 2 workers")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("vLLM was started"))
    told = "/dev/shm has 256.0 MiB free, and host_bytes is 1.0 GiB for each of 2 workers: make"
    refused(run("m", *SET, "-tp", "2"), told, "; or add --connector S3KVConnector\n")
    assert run("m", *SET, "--print").exit_code == 0, "for another host, perhaps"


@pytest.mark.parametrize("version", [GPU, CPU])
def test_host_memory_follows_from_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(folder, version)
    has_shm(monkeypatch, 2**30)
    for_all_bytes, origin = serve._budget(1, in_shm=1)
    assert for_all_bytes <= serve._budget(1, in_shm=0)[0] + 2**30  # others use memory, too
    assert origin.endswith(("available", "free in /dev/shm"))
    monkeypatch.setattr(serve, "_budget", lambda part, in_shm: (2**40 // part, f"1/{part}"))
    _, configs, (note,) = command("m", "--bucket", "my-bucket", "-tp", "8", *SET[4:])
    part = 2**40 // (4 if version == GPU else 16)
    assert f"{part // 8 // 2**30}.0 GiB for each of 8 workers, out of 1/" in note
    extra = configs["kv"]["kv_connector_extra_config"]
    if version == GPU:
        assert extra["cpu_bytes_to_use"] == part
    else:
        assert extra["host_bytes"] == f"{part // 8 // 2**30}GiB"


@pytest.mark.parametrize(
    ("budget", "slabs", "expected"),
    [(2**30, 2, 2**29), (2**30 - 1, 1, 3 * 2**28), (2**20, 0, 2**28), (2**41, 8, 2**36)],
)
def test_every_worker_has_the_same_share(budget: int, slabs: int, expected: int) -> None:
    assert serve.share(budget, slabs) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (1, 1)),
        ("-tp 4 -pp 2 -dp 2", (2, 8)),
        ("--tensor-parallel-size=4 --tensor-parallel-size 2", (1, 2)),
        ("-dp 8 -dpl 2 -tp many", (2, 1)),
        ("-dp 8 --data-parallel-rank 3", (1, 1)),
        ("--data-parallel-size-local 0", (1, 1)),
    ],
)
def test_how_many_workers_there_are(words: str, expected: tuple[int, int]) -> None:
    assert serve.sizes(serve.given_options(words.split())) == expected


def test_the_file_of_vllm_counts_less_than_the_words(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("tensor_parallel_size: '4'  # four\nport: 1\nnested:\n  tp: 3\nlora: False\n")
    given = serve.given_options(["--config", str(file), "--port", "2"])
    words = [given.get(f"--{name}") for name in ("tensor-parallel-size", "port", "lora")]
    assert words == ["4", "2", None]


@pytest.mark.parametrize(
    ("arguments", "connector", "items"),
    [
        ("m", "OffloadingConnector", None),
        ("m --encoder-outputs", "OffloadingConnector", "1GiB"),
        ("m -tp 16 -n 2", "S3KVConnector", None),
        ("m -tp 16 --distributed-executor-backend ray", "S3KVConnector", None),
        ("images", "S3KVConnector", "1GiB"),
        ("images --host-bytes 9GiB", "S3KVConnector", "4GiB"),
        ("images --no-encoder-outputs", "S3KVConnector", None),
        ("images --connector OffloadingConnector", "OffloadingConnector", "1GiB"),
        ("images --language-model-only", "OffloadingConnector", None),
        ("images --ec-transfer-config {}", "S3KVConnector", None),
        ("images --nnodes 2", "S3KVConnector", None),
        ("images -n 1 -pcp 1 --distributed-executor-backend mp", "S3KVConnector", "1GiB"),
        ("images --distributed-executor-backend ray", "S3KVConnector", None),
        ("odd", "S3KVConnector", None),
        ("windows", "S3KVConnector", None),
        ("unused", "OffloadingConnector", None),
        ("local", "S3KVConnector", None),
    ],
)
def test_encoder_outputs_of_multi_modal_models(
    folder: Path, arguments: str, connector: str, items: str | None
) -> None:
    install(folder, GPU)
    bucket = ("--bucket", "my-bucket", "--host-bytes", "1GiB")
    _, configs, notes = command(*bucket, *arguments.split())
    assert configs["kv"]["kv_connector"] == connector
    if items is None:
        assert configs.get("ec", {}) == {}
    else:
        held = configs["ec"]["ec_connector_extra_config"]
        assert held == {"bucket": "my-bucket"} | ({} if items == "4GiB" else {"host_bytes": items})
    assert ["config.json is not found" in note for note in notes] == [True] * (arguments == "odd")


@pytest.mark.parametrize(
    ("version", "arguments", "said"),
    [
        (GPU, ["m", *SET, "--kv-transfer-config", "{}"], "--kv-transfer-config is set"),
        (GPU, ["m", *SET, "--kv_transfer_config.kv_role=kv_both"], "--kv-transfer-config is set"),
        (GPU, ["m", *SET, "--kv-offloading-size", "8"], "--kv-offloading-size is set"),
        (GPU, [*SET, "--port", "8000", "m"], "MODEL is '--port': allowed is"),
        (GPU, ["m", *SET, "--set", "chunk_token=1"], "did you mean 'chunk_tokens'"),
        (GPU, ["m", *SET, "--host-bytes", "much"], "host_bytes is 'much': allowed is"),
        ("0.30.0", ["m", *SET], "vLLM 0.30.0 is not supported"),
    ],
)
def test_refusals(folder: Path, version: str, arguments: list[str], said: str) -> None:
    install(folder, version)
    refused(run(*arguments, "--print"), said)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    refused(run("m", *SET), f"{sys.executable} has no vLLM")


def test_which_vllm_runs_on_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(folder, GPU)
    assert serve.runs_on_gpus()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert not serve.runs_on_gpus()
    monkeypatch.delenv("VLLM_TARGET_DEVICE")
    entry = "[vllm.platform_plugins]\nother = other:platform\n"
    (folder / "vllm-0.dist-info" / "entry_points.txt").write_text(entry)
    assert not serve.runs_on_gpus()


@pytest.mark.skipif(any(metadata.distributions(name="vllm")), reason="runs the script of vLLM")
def test_vllm_takes_the_place_of_this_process(tmp_path: Path) -> None:
    """Its signals and its exit code are vLLM's."""
    packages = ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai")
    server = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    plant(tmp_path, {f"{package}/__init__.py": "" for package in packages})
    plant(tmp_path, {f"{packages[-1]}/api_server.py": server})
    process = subprocess.Popen(
        [sys.executable, "-m", "s3kv.cli", "serve", ".", *SET, "--port", "1"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    printed, _ = process.communicate()
    assert process.returncode == 7
    words = printed.split()
    assert words[:2] == [str(process.pid), "--model=."]
    assert words[-2:] == ["--port", "1"]
