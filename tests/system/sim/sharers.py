"""A fleet whose engines share their chunks with engines of other parallel sizes, from a seed.

The engines of a model have random numbers of tensor ranks and of pipeline stages, and so have the
replicas beside the simulated ones. Each reads what the others have stored, of which single shards
are lost and damaged. What must hold, beside all that holds of every fleet:

1. A chunk is put together only of good objects that hold all of it, and of the right bytes.
2. An engine never deletes an object of another size.
3. In the end, every engine uses what a fleet of another size has stored.
"""

from __future__ import annotations

import dataclasses

from s3kv.config import Config
from tests.system.sim.fleet import Fleet
from tests.system.sim.meaning import Shard
from tests.system.sim.node import Node
from tests.system.sim.store import Bucket

SIZES = [(1, 1), (2, 1), (2, 2), (4, 2)]
"""Numbers of ranks and of pipeline stages."""


def shards_of(model: int, ranks: int, stages: int) -> list[Shard]:
    return [Shard.of(model, ranks, rank, stages) for rank in range(ranks)]


class SharingFleet(Fleet):
    def draw_config(self) -> Config:
        return dataclasses.replace(super().draw_config(), share_ranks=True)

    def make_bucket(self, config: Config) -> Bucket:
        """The namespaces have had engines of every size, which have listed their shards there."""
        shards = [shard for model in (0, 1) for size in SIZES for shard in shards_of(model, *size)]
        return Bucket(
            self.rng,
            *self.watchers(),
            foreign=frozenset(f"{shard.namespace.root}shapes/{shard.name}" for shard in shards),
        )

    def draw_ranks(self) -> tuple[int, int]:
        return self.rng.choice(SIZES)

    def publish(self, node: Node, prompt: list[int]) -> None:
        """By a replica of another size."""
        own = (node.setup.world_size, node.stages)
        size = self.rng.choice([size for size in SIZES if size != own])
        node.publish(
            self._dictionary.chain(prompt), shards_of(node.model, *size), form=self.draw_form(node)
        )
