"""Requests whose hashes do not say enough: adapters, and images named by the client."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from s3kv.connectors.requests import DerivedHashes, RequestHashes, names_are_hashes

HASHES = [bytes([n]) * 32 for n in range(10)]


def adapter_in(place: Path, content: bytes = b"weights") -> str:
    place.mkdir(exist_ok=True)
    (place / "adapter_model.safetensors").write_bytes(content)
    os.utime(place / "adapter_model.safetensors", (1, 1))
    return str(place)


def request(path: str | None = None, *, images: tuple[str, ...] = (), **lora: Any) -> Any:
    adapter = {"lora_name": "a", "lora_int_id": 1} | lora
    return SimpleNamespace(
        block_hashes=HASHES,
        mm_features=[SimpleNamespace(identifier=name) for name in images],
        lora_request=None if path is None else LoRARequest(lora_path=path, **adapter),
    )


def test_a_plain_request_keeps_its_hashes() -> None:
    assert RequestHashes().of(request()) is HASHES
    assert RequestHashes().of(request(images=("ab" * 32,))) is HASHES


def test_equal_adapters_share_and_others_do_not(tmp_path: Path) -> None:
    one = RequestHashes().of(request(adapter_in(tmp_path / "one")))
    same = RequestHashes().of(request(adapter_in(tmp_path / "same"), lora_name="b", lora_int_id=2))
    other = RequestHashes().of(request(adapter_in(tmp_path / "other", b"others!")))
    assert list(one) == list(same)
    assert not set(one) & {*other, *HASHES}
    assert len(set(one)) == len(HASHES)


def test_an_adapter_changed_on_disk_is_not_cached_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell which of the two the engine has in memory."""
    hashes = RequestHashes()
    path = adapter_in(tmp_path / "a")
    before = list(hashes.of(request(path)))
    adapter_in(tmp_path / "a", b"retrained")
    with caplog.at_level(logging.WARNING, "s3kv"):
        assert list(hashes.of(request(path))) == []
        assert list(hashes.of(request(path))) == []
    (said,) = caplog.messages
    assert path in said
    assert "load it under a new name" in said
    reloaded = list(hashes.of(request(path, load_inplace=True)))
    assert len(reloaded) == len(HASHES)
    assert reloaded != before
    assert list(hashes.of(request(path))) == reloaded


def test_an_adapter_that_is_not_here_is_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "s3kv"):
        assert list(RequestHashes().of(request("org/adapter"))) == []
    assert "cannot be read here" in caplog.messages[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ab" * 32, True),
        ("ab" * 64, True),
        ("adapter:" + "ab" * 32, True),
        ("my-cat.png", False),
        ("AB" * 32, False),
        ("ab" * 32 + "-1", False),
        ("", False),
    ],
)
def test_names_of_images(name: str, content: bool) -> None:
    assert names_are_hashes([name]) is content
    assert names_are_hashes(["ab" * 32, name]) is content
    assert list(RequestHashes().of(request(images=(name,)))) == (HASHES if content else [])


def test_derived_hashes_follow_the_list_they_are_made_of() -> None:
    """As the planner reads them: every n-th, from where it stopped."""
    growing = HASHES[:4]
    derived = DerivedHashes(growing, b"key")
    assert len(derived) == 4
    assert derived[1::2] == [derived[1], derived[3]]
    growing += HASHES[4:]
    assert len(derived[3::2]) == 4
    assert list(derived) == list(DerivedHashes(HASHES, b"key"))
    assert derived[0] != DerivedHashes(HASHES, b"other")[0]
