"""What of vLLM's wheel goes along, and what stands in for it where there is no CUDA."""

from __future__ import annotations

import zipfile
from pathlib import Path

from scripts.gpu import pack
from tests.scripts.gpu.test_fatbins import CODE, entry, library, region

KEPT = library(region(entry(CODE, 80, bytes(32)), entry(CODE, 90, b"9" * 32)))
FILES = {
    "vllm/__init__.py": b"",
    "vllm/vllm_flash_attn/__init__.py": b"",
    "vllm/style.css": b"c",
    "vllm/_other_C.abi3.so": b"o",
    "vllm/vllm-rs": b"r",
    "vllm/_C_stable_libtorch.abi3.so": library(
        region(entry(CODE, 80, b"8" * 32), entry(CODE, 90, b"9" * 32))
    ),
}


def test_a_wheel_is_packed_with_the_code_of_one_architecture(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    pack.write(tmp_path / pack.ARCHIVE, pack.of_the_wheel(wheel, 90), preset=0)
    pack.unpack(tmp_path, tmp_path / "gpu", compiled=True)
    pack.unpack(tmp_path, tmp_path / "none", compiled=False)
    package = tmp_path / "gpu" / "vllm"
    assert (package / "_C_stable_libtorch.abi3.so").read_bytes() == KEPT
    assert not [name for name in ("style.css", "_other_C.abi3.so") if (package / name).exists()]
    stubbed = {path.name for path in (tmp_path / "none" / "vllm").iterdir()}
    assert "_C_stable_libtorch.py" in stubbed
    assert "_C_stable_libtorch.abi3.so" not in stubbed


def test_services_that_nobody_calls_stay_behind() -> None:
    data = "botocore/data"
    names = (f"{data}/s3/a", f"{data}/sts/a", f"{data}/endpoints.json", "vllm/v1/a.py")
    assert not [name for name in names if pack.UNUSED.match(name)]
    assert pack.UNUSED.match(f"{data}/ec2/a")
    assert pack.UNUSED.match("vllm/vllm-rs")
