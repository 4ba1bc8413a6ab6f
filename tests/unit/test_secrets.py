"""Keys from a file and from the environment. Of integrity's secret: `objects/test_integrity.py`."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from s3kv.config import KEYS_VARIABLE, Config
from s3kv.errors import ConfigError
from s3kv.secrets import encryption_keys

HEX, OTHER = "0123456789abcdef" * 4, "F" * 64
KMS = "kms:" + base64.b64encode(bytes(range(184))).decode()


def config(path: Path | None = None) -> Config:
    file = None if path is None else str(path)
    return Config(bucket="bkt", encryption="aes-gcm", encryption_keys_file=file)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (HEX, [HEX]),
        (f"{HEX}\n", [HEX]),
        (f"\n{OTHER}\r\n\n  {HEX}\t\n", [OTHER, HEX]),
        (f"{KMS}\n{HEX}", [KMS, HEX]),
        ("\n".join([HEX] * 4), [HEX] * 4),
        *((f"kms:{base64.b64encode(bytes(n)).decode()}",) * 2 for n in (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("mode", [None, 0o640, 0o604])
def test_keys_from_either_place(
    text: str,
    keys: list[str],
    mode: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "not these" if mode else text)
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode or 0)
    for _ in range(2):
        where, found = encryption_keys(config(path if mode else None))
    assert found == ([keys] if isinstance(keys, str) else keys)
    file = f"encryption_keys_file '{path}'"
    assert where == (file if mode else f"the environment variable {KEYS_VARIABLE}")
    assert caplog.text.count(f"every user of this host may read {file}") == (mode == 0o604)


BAD = {
    "nothing": (b"", "0 words"),
    "white space": (b" \n\t\r\n", "0 words"),
    "a digit less": (HEX[:-1].encode(), "1 word, and word 1 is not a key"),
    "a digit more": (f"{HEX}0".encode(), "1 word, and word 1 is not a key"),
    "another letter": (f"{HEX[:-1]}g".encode(), "1 word, and word 1 is not a key"),
    "a comment": (f"# mine\n{HEX}".encode(), "3 words, and word 1 is not a key"),
    "the second": (f"{HEX} {HEX[:60]}".encode(), "2 words, and word 2 is not a key"),
    "too many": ("\n".join([HEX] * 5).encode(), "5 words: allowed are 1 to 4 keys"),
    "an empty data key": (b"kms:", "word 1 is not a key"),
    "no base64": (KMS[:-1].encode(), "word 1 is not a key"),
    "base64 for URLs": (b"kms:__--", "word 1 is not a key"),
    "padding within": (b"kms:QQ==QUJD", "word 1 is not a key"),
    "another scheme": (KMS.replace("kms", "KMS").encode(), "word 1 is not a key"),
    "quotes": (f'"{HEX}"'.encode(), "word 1 is not a key"),
    "other alphabets": (("\uff10" * 64).encode(), "word 1 is not a key"),
    "UTF-16": (HEX.encode("utf-16"), "word 1 is not a key"),
    "the key itself": (bytes.fromhex(HEX), "word 1 is not a key"),
}


@pytest.mark.parametrize(
    ("what", "in_file"),
    [(what, in_file) for what in BAD for in_file in (True, False) if in_file or what != "UTF-16"],
)
def test_other_text_is_refused_and_not_repeated(
    what: str, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, said = BAD[what]
    path = tmp_path / "keys"
    path.write_bytes(content)
    if not in_file:
        monkeypatch.setenv(KEYS_VARIABLE, content.decode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        encryption_keys(config(path if in_file else None))
    told = str(caught.value)
    assert said in told
    assert (str(path) if in_file else KEYS_VARIABLE) in told
    assert "openssl rand -hex 32" in told
    for part in (HEX[:8], HEX[-8:], KMS[4:12], "mine"):
        assert part not in told


def test_a_variable_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"variable {KEYS_VARIABLE} holds 0 words"):
        encryption_keys(config())


@pytest.mark.parametrize(
    ("file", "why"), [("missing", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read(file: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"encryption_keys_file '{tmp_path}.*{why}"):
        encryption_keys(config(tmp_path / file))
