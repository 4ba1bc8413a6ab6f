"""The nouns that all share."""

from __future__ import annotations

from s3kv.types import Tally


def test_a_tally_tells_of_every_change() -> None:
    tally, versions = Tally(), [Tally().version]
    assert tally["absent"] == 0
    assert tally.version == versions[0]
    for change in (
        lambda: tally.update(saves=2),
        lambda: tally.update({"saves": 1}),
        lambda: tally.__setitem__("hits", 1),
    ):
        change()
        assert tally.version > versions[-1]
        versions.append(tally.version)
    tally["hits"] += 1
    assert tally.version > versions[-1]
    assert tally == {"saves": 3, "hits": 2}
