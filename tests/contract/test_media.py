"""Requests with media: told apart by what the encoder is given, whatever it is called."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from s3kv.connectors.media import MediaDigests, MediaNames, check_media_names
from s3kv.connectors.request_hashes import RequestHashes
from s3kv.errors import ConfigError
from tests.contract.hashed_requests import given, hashing
from tests.contract.pictures import kwargs_item, picture

HASHES = [bytes([n]) * 32 for n in range(20)]
HASH = "ab" * 32


def request(name: str, *features: MultiModalFeatureSpec, resumable: bool = False) -> Any:
    return given(list(HASHES), *features, request_id=name, resumable=resumable)


def hashes(one: Any, of: RequestHashes | None = None) -> list[bytes]:
    return list((of or hashing()).of(one, None)[:])


@pytest.mark.parametrize("name", [HASH, "cd" * 64, f"adapter:{HASH}", "my-cat.png"])
def test_one_name_for_two_images_is_two_prefixes(name: str) -> None:
    """In two engines, which share a bucket: a name of 64 digits need not be a hash."""
    one, other = hashes(request("r", picture(name))), hashes(request("r", picture(name, value=2)))
    assert len(one) == len(other) == len(HASHES)
    assert not set(one) & {*other, *HASHES}
    assert one == hashes(request("s", picture(name)))
    trusted = hashes(request("r", picture(name)), hashing(trusted=True))
    assert trusted == hashes(request("r", picture(name, value=2)), hashing(trusted=True)) == HASHES


def test_turns_of_a_conversation_share_what_comes_before_the_next_image() -> None:
    first = picture("a", offset=40, length=20)  # from the third block on
    second = picture("b", offset=160, length=20, value=2)  # begins the eleventh
    plain, one, two = (
        hashes(request("r", *features)) for features in ((), (first,), (first, second))
    )
    assert plain == HASHES
    assert one[:2] == plain[:2]
    assert not set(one[2:]) & set(plain)
    assert two[:10] == one[:10]
    assert not set(two[10:]) & set(one)
    assert len({*one, *two}) == 20 + 10


def test_where_the_embeddings_go_is_part_of_the_content() -> None:
    every, half = torch.ones(100, dtype=torch.bool), torch.arange(100) < 50
    given = [
        picture("a"),
        picture("a", mask=every),
        picture("a", mask=half),
        picture("a", length=90),
        picture("a", modality="video"),
    ]
    assert len({hashes(request("r", one))[0] for one in given}) == len(given)


@pytest.mark.parametrize("data", ["gone", "shared memory", "layout alone"])
def test_an_image_whose_tensors_are_not_here_is_not_cached(
    data: str, caplog: pytest.LogCaptureFixture
) -> None:
    item = {
        "gone": None,
        "shared memory": kwargs_item(address=4096, monotonic_id=3, signature=[1, 2]),
        "layout alone": kwargs_item(image_grid_thw=torch.tensor([1, 10, 10])),
    }[data]
    one = MultiModalFeatureSpec(item, "image", HASH, PlaceholderRange(0, 100), HASH)
    of = hashing()
    assert [hashes(request(name, one), of) for name in ("r", "s")] == [[], []]
    assert len(caplog.messages) == 1
    assert hashes(request("t", picture(HASH)), of) == [], "the engine may have the other by it"
    assert hashes(request("u", one), hashing(trusted=True)) == HASHES


def test_a_name_that_stood_for_two_images_bars_whoever_uses_it() -> None:
    """vLLM's own caches go by names: nobody knows which of the two an engine computes with."""
    of = hashing()
    before = request("before", picture(HASH))
    assert hashes(before, of)
    assert hashes(request("bystander", picture("b")), of)
    assert hashes(request("ended", picture(HASH)), of)
    of.finished("ended")
    assert of.take_barred() == set()
    assert hashes(request("planted", picture(HASH, value=2)), of) == []
    assert of.take_barred() == {"before", "planted"}
    assert of.take_barred() == set()
    assert hashes(request("after", picture(HASH)), of) == [], "and for good"


@pytest.mark.parametrize("had", [(), (picture(HASH, offset=40),)], ids=["new name", "known name"])
def test_what_a_session_is_given_later_is_not_cached(had: tuple[Any, ...]) -> None:
    of, session = hashing(), request("session", *had, resumable=True)
    before = of.of(session, None)
    assert before[:2] == HASHES[:2]
    assert hashes(request("other", picture(HASH)), of)
    session.mm_features.append(picture(HASH, value=2))
    assert (len(before), before[2:]) == (0, [])
    of.scheduled("session", session.mm_features)
    assert of.take_barred() == {"session", "other"}
    of.scheduled("session", session.mm_features)
    assert of.take_barred() == set()


def test_names_beyond_the_memory_for_them_are_disputed(caplog: pytest.LogCaptureFixture) -> None:
    of = hashing()
    of._names = MediaNames(capacity=1)
    assert hashes(request("r", picture("a")), of)
    assert hashes(request("s", picture("a", value=2)), of) == []
    assert "one name has stood for two images" in caplog.text
    assert "a million others came before" not in caplog.text
    assert hashes(request("t", picture("b")), of) == []
    assert "a million others came before" in caplog.text
    names = MediaNames(capacity=1)
    assert not names.disputed("a", b"1")
    assert names.disputed("b", b"1")
    assert not names.disputed("a", b"1"), "none is forgotten"
    assert names.disputed("a", b"2")
    assert names.disputed("a", b"1")


def test_a_digest_is_of_every_byte_and_is_made_once() -> None:
    digests = MediaDigests()

    def digest(**values: Any) -> bytes | None:
        position = PlaceholderRange(0, 4)
        return digests.of(MultiModalFeatureSpec(kwargs_item(**values), "image", "n", position, "n"))

    flat = torch.arange(8.0)
    different = [
        digest(pixels=flat),
        digest(other=flat),
        digest(pixels=flat.double()),
        digest(pixels=flat.reshape(2, 4)),
        digest(pixels=[flat]),
        digest(pixels=[flat[:4], flat[4:]]),
        digest(pixels=flat, seconds=[0.5]),
        digest(pixels=flat, seconds=[1, 2]),
        digest(pixels=flat, seconds=["1", "2"]),
        digest(pixels=flat.flip(0)),
    ]
    assert None not in different
    assert len(set(different)) == len(different)
    assert digest(pixels=torch.arange(16.0)[::2]) == digest(pixels=torch.arange(0.0, 16.0, 2))
    assert digest(pixels=flat, what=object()) is None
    assert digest(pixels=flat.to("meta")) is None, "on a device"
    one = picture("a")
    first = digests.of(one)
    one.data["pixel_values"].data.zero_()
    assert digests.of(one) == first, "read again"
    del one
    gc.collect()
    assert digests._known == {}


@pytest.mark.parametrize(
    ("cache_gb", "prefix", "multimodal", "trusted", "refused"),
    [
        (0, True, True, True, False),
        (4, False, True, True, False),
        (0, False, False, True, False),
        (0, False, True, False, False),
        (0, False, True, True, True),
    ],
)
def test_trusted_names_need_a_vllm_that_gives_lasting_ones(
    cache_gb: int, prefix: bool, multimodal: bool, trusted: bool, refused: bool
) -> None:
    settings = SimpleNamespace(mm_processor_cache_gb=cache_gb) if multimodal else None
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=settings),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix),
    )
    raises = pytest.raises(ConfigError, match="numbers unnamed media")
    with raises if refused else contextlib.nullcontext():
        check_media_names(config, trusted=trusted)
