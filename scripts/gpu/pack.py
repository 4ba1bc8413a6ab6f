"""What to bring to a machine without a package index: `python -m scripts.gpu.pack FOLDER`.

FOLDER/site.tar.xz: the packages that the I/O process and the engine need beside the machine's own,
for --python (3.12) on Linux and x86-64, in the versions of this environment; and the wheel of vLLM
for CUDA in the version of this environment, with the machine code of one architecture (--arch, 90:
H100 and H200) in its compiled modules. Those modules use torch's stable interface alone, and run
beside an older torch than the wheel asks for.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.metadata
import importlib.util
import io
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts.gpu.fatbins import of_one_architecture

FOR_THE_IO_PROCESS = (
    *("aiobotocore", "botocore", "aioitertools", "jmespath", "msgspec", "h11"),
    *("blosc2", "msgpack", "ndindex", "numexpr"),  # compression
    *("cryptography", "cffi", "pycparser"),  # encryption
)
FOR_THE_ENGINE = (
    *("annotated-types", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "compressed-tensors"),
    *("fastapi", "httpx2", "llguidance", "loguru", "openai", "opentelemetry-api", "oss-harmony"),
    *("partial-json-parser", "pybase64", "pydantic", "pydantic_core", "pyzmq", "sniffio"),
    *("starlette", "typing-inspection", "xgrammar"),
)
"""What the engine imports on its way to a small Llama, and machines for training rarely have."""

PLATFORMS = tuple(
    f"manylinux{tag}_x86_64"
    for tag in ("_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "_2_12", "2014", "1")
)
ARCHIVE = "site.tar.xz"
_PACKAGE = "vllm/"
COMPILED = tuple(
    f"{_PACKAGE}{name}.abi3.so"
    for name in (
        "_C_stable_libtorch",
        "_moe_C_stable_libtorch",
        "cumem_allocator",
        "spinloop",
        "vllm_flash_attn/_vllm_fa2_C",
        "vllm_flash_attn/_vllm_fa3_C",
    )
)
"""The modules of the wheel that an engine with a small Llama, or a sleeping one, loads."""
STUBS = {
    "_C_stable_libtorch.py": Path(__file__).with_name("compiled.py").read_bytes(),
    "vllm_flash_attn/_vllm_fa2_C.py": b"",
    "vllm_flash_attn/_vllm_fa3_C.py": b"",
}
"""In their place where there is no CUDA."""
UNUSED = re.compile(r"vllm/vllm-rs|botocore/data/(?!s3/|sts/)[^/]+/")
"""A server in Rust, and the services of AWS that are neither S3 nor the issue of credentials."""
LEFT_OUT = (".so", ".pyc", ".jpg", ".css", ".js")
Member = tuple[str, bytes]
"""The name of a file below the site, and its content."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--arch", type=int, default=90)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    archive = options.folder / ARCHIVE
    with tempfile.TemporaryDirectory() as work:
        site, wheels = Path(work) / "site", Path(work) / "wheels"
        names = (*FOR_THE_IO_PROCESS, *FOR_THE_ENGINE)
        asked = [f"{name}=={importlib.metadata.version(name)}" for name in names]
        _pip("install", options.python, "--no-compile", "--target", str(site), *asked)
        _pip("download", options.python, "--dest", str(wheels), f"vllm=={installed_engine()[1]}")
        (wheel,) = wheels.iterdir()
        members = (*_tree(site, ""), *of_the_wheel(wheel, options.arch))
        write(archive, (member for member in members if not UNUSED.match(member[0])))
    print(f"{archive}: {archive.stat().st_size / 2**20:.0f} MiB")


def _pip(command: str, python: str, *arguments: str) -> None:
    """Raises CalledProcessError when there is no wheel."""
    options = [option for name in PLATFORMS for option in ("--platform", name)]
    options += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    whole = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *options, *arguments]
    subprocess.run(whole, check=True)


def of_the_wheel(wheel: Path, architecture: int) -> Iterator[Member]:
    """What an engine needs of it."""
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name in COMPILED:
                yield name, of_one_architecture(files.read(name), architecture)
            elif not set(Path(name).suffixes) & set(LEFT_OUT) and not name.endswith("/"):
                yield name, files.read(name)


def installed() -> Iterator[Member]:
    """The same of this environment's vLLM, without its compiled modules."""
    root, version = installed_engine()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode()
    yield f"vllm-{version}.dist-info/METADATA", metadata
    yield from _tree(root, _PACKAGE, LEFT_OUT)


def installed_engine() -> tuple[Path, str]:
    """The folder of this environment's vLLM, and its version without what the build adds to it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vLLM is not installed here: make venv")
    names = importlib.metadata.packages_distributions()["vllm"]
    return Path(spec.origin).parent, importlib.metadata.version(names[0]).partition("+")[0]


def _tree(root: Path, under: str, left_out: Sequence[str] = ()) -> Iterator[Member]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not set(path.suffixes) & set(left_out):
            yield f"{under}{path.relative_to(root)}", path.read_bytes()


def write(archive: Path, members: Iterable[Member], preset: int = 6) -> None:
    """preset: of xz; how much time the size is worth."""
    with (
        lzma.open(archive, "wb", preset=preset) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def unpack(folder: Path, site: Path, *, compiled: bool) -> None:
    """Everything in `folder` into `site`, which then goes before all else on PYTHONPATH.

    compiled: with the compiled modules; otherwise with `STUBS`.
    """
    with tarfile.open(folder / ARCHIVE) as archive:
        archive.extractall(site, filter="data")
    if compiled:
        compileall.compile_dir(site, quiet=2, workers=0)  # once, and not in every engine at once
    else:
        for name in COMPILED:
            (site / name).unlink(missing_ok=True)
        for name, content in STUBS.items():
            (site / _PACKAGE / name).write_bytes(content)


if __name__ == "__main__":
    main()
