"""What to bring to a machine without a package index: `python -m scripts.gpu.pack FOLDER`.

FOLDER/wheels: what the I/O process and the engine need beside the machine's own packages, in the
versions of this environment, for --python (3.12) on Linux and x86-64.
FOLDER/vllm.tar.xz: the Python files of this environment's vLLM under the name of the build for
CUDA, and `compiled.py` in place of its compiled modules.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import lzma
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FOR_THE_IO_PROCESS = ("aiobotocore", "botocore", "aioitertools", "jmespath", "msgspec", "h11")
FOR_THE_ENGINE = (
    *("annotated-types", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "fastapi", "httpx2"),
    *(
        "llguidance",
        "openai",
        "opentelemetry-api",
        "oss-harmony",
        "partial-json-parser",
        "pybase64",
    ),
    *(
        "pydantic",
        "pydantic_core",
        "pyzmq",
        "sniffio",
        "starlette",
        "typing-inspection",
        "xgrammar",
    ),
)
"""What the engine imports on its way to a small Llama, and machines for training rarely have."""

PLATFORMS = tuple(
    f"manylinux{tag}_x86_64"
    for tag in ("_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "_2_12", "2014", "1")
)
ENGINE = "vllm.tar.xz"
STUBS = {
    "vllm/_C_stable_libtorch.py": Path(__file__).with_name("compiled.py"),
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": None,
}
"""Compiled modules without which vLLM does not import, and what is archived under their name; None
for an empty file, where nobody calls the module because Triton computes attention."""
LEFT_OUT = (".so", ".pyc", ".jpg", ".css", ".js")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    download(options.folder / "wheels", options.python)
    write_engine(options.folder / ENGINE)
    files = [path for path in options.folder.rglob("*") if path.is_file()]
    print(f"{sum(path.stat().st_size for path in files) / 2**20:.0f} MiB in {len(files)} files")


def download(folder: Path, python: str) -> None:
    """Raises CalledProcessError when there is no wheel."""
    asked = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in (*FOR_THE_IO_PROCESS, *FOR_THE_ENGINE)
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [option for name in PLATFORMS for option in ("--platform", name)]
    subprocess.run([*command, "--dest", str(folder), *asked], check=True)


def write_engine(path: Path, preset: int = 6) -> None:
    """preset: of xz; how much time the size is worth."""
    root, version = installed_engine()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode()
    files = {f"vllm-{version}.dist-info/METADATA": metadata}
    files |= {name: source.read_bytes() if source else b"" for name, source in STUBS.items()}
    with (
        lzma.open(path, "wb", preset=preset) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for file in python_files(root):
            archive.add(file, f"vllm/{file.relative_to(root)}")
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def installed_engine() -> tuple[Path, str]:
    """The folder of this environment's vLLM, and its version without what the build adds to it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vLLM is not installed here: make venv")
    names = importlib.metadata.packages_distributions()["vllm"]
    return Path(spec.origin).parent, importlib.metadata.version(names[0]).partition("+")[0]


def python_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not set(path.suffixes) & set(LEFT_OUT):
            yield path


def unpack(folder: Path, site: Path, *, timeout_s: float) -> None:
    """Everything in `folder` into `site`, which then goes before all else on PYTHONPATH.

    Raises CalledProcessError when a wheel is not for this machine, TimeoutExpired when pip is slow.
    """
    wheels = sorted((folder / "wheels").glob("*.whl"))
    if wheels:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--target", str(site), *map(str, wheels)]
        subprocess.run(command, check=True, timeout=timeout_s)
    with tarfile.open(folder / ENGINE) as archive:
        archive.extractall(site, filter="data")


if __name__ == "__main__":
    main()
