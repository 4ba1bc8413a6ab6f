"""Requests whose hashes do not say enough: with adapters or embeddings. Images: test_media.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from s3kv.connectors.request_hashes import DerivedHashes
from tests.contract.hashed_requests import TOKENS, arriving, given, hashed, hashing, rows
from tests.contract.pictures import picture

HASHES = [bytes([n]) * 32 for n in range(10)]


def request(*features: Any, adapter: Any = None) -> Any:
    return given(HASHES, *features, lora_request=adapter)


def hashes_of(**fields: Any) -> list[bytes]:
    """Of a request as the engine core makes it."""
    return list(hashing().of(hashed(arriving(**fields)), None))


ADAPTER = LoRARequest("a", 1, "/nowhere")


def test_a_plain_request_keeps_its_hashes() -> None:
    assert hashing().of(request(), None) is HASHES


def test_an_adapter_and_an_image_both_count() -> None:
    image = picture("cat", offset=40, length=20)  # from the third block on

    def hashes(key: bytes | None, *features: Any) -> list[bytes]:
        adapter = None if key is None else ADAPTER
        return list(hashing().of(request(*features, adapter=adapter), key))

    pictured, adapted, both = hashes(None, image), hashes(b"1"), hashes(b"1", image)
    assert adapted == hashes(b"1")
    assert len({*HASHES, *adapted, *hashes(b"2")}) == 3 * len(HASHES)
    assert both[:2] == adapted[:2], "the image has not begun"
    assert not set(both[2:]) & {*pictured, *adapted, *HASHES}
    assert not set(both) & set(hashes(b"2", image))
    assert list(hashing().of(request(adapter=ADAPTER), None)) == [], "an unknown adapter"


def test_derived_hashes_follow_the_list_they_are_made_of() -> None:
    """As the planner reads them: every n-th, from where it stopped."""
    growing = HASHES[:4]
    derived = DerivedHashes(growing, b"key")
    assert derived[1::2] == [derived[1], derived[3]]
    growing += HASHES[4:]
    assert len(derived[3::2]) == 4
    assert list(derived) == list(DerivedHashes(HASHES, b"key"))


def mixed(*, embedded: range, token: int = 0) -> list[bytes]:
    """Hashes of a prompt whose positions in `embedded` are embeddings."""
    is_token = [position not in embedded for position in range(TOKENS)]
    ids = [token] * TOKENS
    return hashes_of(prompt_token_ids=ids, prompt_embeds=rows(), prompt_is_token_ids=is_token)


def test_which_positions_are_embeddings_counts_from_there_on() -> None:
    """vLLM's hashes of all these prompts are the same (vllm#56655)."""
    whole = range(TOKENS)
    none, first, second, longer, every = (
        mixed(embedded=positions)
        for positions in (range(0), whole[16:32], whole[40:56], whole[40:80], whole)
    )
    assert none[:1] == first[:1]
    assert none[:2] == second[:2]
    assert second[:3] == longer[:3] != none[:3]
    assert len({*none, *first, *second, *longer, *every}) == 10 + 9 + 8 + 7 + 10
    assert mixed(embedded=whole[16:32]) == first


def test_a_prompt_of_embeddings_alone_is_cached_by_their_content() -> None:
    def alone(embeds: Any) -> list[bytes]:
        return hashes_of(prompt_token_ids=None, prompt_embeds=embeds)

    one, longer = alone(rows()), alone(torch.cat([rows(), rows(2)]))
    assert len(one) == 10
    assert one == alone(rows()) == longer[:10]
    different = [
        one,
        alone(rows(2)),
        mixed(embedded=range(0)),
        alone(rows(dtype=torch.float16)),
        alone(rows(dtype=torch.float16).view(torch.bfloat16)),  # the same bytes
    ]
    assert len({hashes[0] for hashes in different}) == len(different)


def test_token_ids_behind_embeddings_count() -> None:
    """Some models read them beside the embeddings, and the first runner their positions."""
    assert mixed(embedded=range(TOKENS), token=7)[0] != mixed(embedded=range(TOKENS))[0]


def test_embeddings_of_uncertain_places_are_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's runners compute different things from ids and embeddings without a mask."""
    of = hashing()
    request = hashed(arriving(prompt_embeds=rows()))
    assert list(of.of(request, None)) == list(of.of(request, None)) == []
    assert len(caplog.messages) == 1
    assert "only one of prompt_token_ids and prompt_is_token_ids" in caplog.text


def test_types_of_tokens_count() -> None:
    """Of a pooling model, which vLLM gives to the model beside the tokens."""

    def typed(**extra: int) -> list[bytes]:
        params = PoolingParams(task="classify", extra_kwargs=extra or None)
        return hashes_of(sampling_params=None, pooling_params=params)

    different = [typed(), *(typed(compressed_token_type_ids=number) for number in (0, 8, 24))]
    assert len({hashes[0] for hashes in different}) == len(different)
    assert typed(compressed_token_type_ids=8) == different[2]
    assert typed(joint_schema=1) == typed() == hashed(arriving()).block_hashes


@pytest.mark.parametrize("changed", [None, lambda request: []], ids=["gone", "another call"])
def test_a_vllm_that_hashes_embeddings_in_another_way_is_left_alone(
    changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, embedded = hashed(arriving()), hashed(arriving(prompt_embeds=rows()))
    embedded.prompt_token_ids = None
    monkeypatch.setattr(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", changed)
    of = hashing()
    assert list(of.of(plain, None)) == plain.block_hashes
    assert list(of.of(embedded, None)) == []
    assert kv_cache_utils._gen_prompt_embeds_extra_hash_keys is changed
