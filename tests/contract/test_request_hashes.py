"""Requests whose hashes do not say enough: those with an adapter. For images see test_media.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.lora.request import LoRARequest

from s3kv.connectors.request_hashes import DerivedHashes, RequestHashes
from tests.contract.pictures import picture

HASHES = [bytes([n]) * 32 for n in range(10)]


def answers() -> RequestHashes:
    return RequestHashes(trust_media_names=False, block_tokens=16)


def request(*features: Any, adapter: Any = None) -> Any:
    return SimpleNamespace(
        request_id="r",
        block_hashes=HASHES,
        mm_features=list(features),
        lora_request=adapter,
    )


ADAPTER = LoRARequest("a", 1, "/nowhere")


def test_a_plain_request_keeps_its_hashes() -> None:
    assert answers().of(request(), None) is HASHES


def test_an_adapter_derives_them_and_an_unknown_one_has_none() -> None:
    one, same, other = (
        list(answers().of(request(adapter=ADAPTER), key)) for key in (b"1", b"1", b"2")
    )
    assert one == same
    assert not set(one) & {*other, *HASHES}
    assert len(set(one)) == len(HASHES)
    assert list(answers().of(request(adapter=ADAPTER), None)) == []


def test_an_adapter_and_an_image_both_count() -> None:
    image = picture("cat", offset=40, length=20)  # from the third block on

    def hashes(key: bytes | None, *features: Any) -> list[bytes]:
        adapter = None if key is None else ADAPTER
        return list(answers().of(request(*features, adapter=adapter), key))

    pictured, adapted, both, other = (
        hashes(None, image),
        hashes(b"1"),
        hashes(b"1", image),
        hashes(b"2", image),
    )
    assert both[:2] == adapted[:2], "the image has not begun"
    assert not set(both[2:]) & {*pictured, *adapted, *other, *HASHES}
    assert not set(both) & set(other)


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
