"""Certificates for servers that speak TLS on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(path: Path, *names: str) -> Path:
    """A certificate for `names` ("IP:127.0.0.1"): with its key in `path`, alone in `path`.crt."""
    key = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30"
    subject = ["-subj", "/CN=localhost", "-addext", f"subjectAltName={','.join(names)}"]
    files = ["-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run([*key.split(), *subject, *files], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path
