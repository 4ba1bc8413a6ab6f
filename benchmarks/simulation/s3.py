"""A model of S3's request limits: partitions of the key space, each with a rate, that split under
load. Pure: times are seconds of one clock, passed in; all chance is from one generator.

What AWS documents: at least 3,500 writes or 5,500 reads per second and partitioned prefix; 503
SlowDown above that; more partitions after sustained load. What it does not, and is assumed here:

- Writes and reads share a partition: a write takes 1/3,500 of its second, a read 1/5,500.
- A second's worth of requests may come at once. A refused request takes nothing of the limit.
- A bucket begins as one partition. One whose load was above 80 % of its limit in each of five
  minutes splits at the median of the keys that were asked for lately, in no time. Partitions never
  merge, and one with a single busy key does not split.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_LOOK_S = 60.0
_RECENT_KEYS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """put_per_s, get_per_s: of a partition that does nothing else; infinite: no limit. burst_s: so
    much of it may come at once. refused_share: what a refused request takes of the limit, relative
    to one that is served. split_after_s, split_load: a partition splits after so long above such a
    share of its limit."""

    put_per_s: float = 3_500.0
    get_per_s: float = 5_500.0
    burst_s: float = 1.0
    refused_share: float = 0.0
    split_after_s: float = 300.0
    split_load: float = 0.8

    def cost_s(self, *, write: bool) -> float:
        """What a request takes of a partition's time."""
        return 1 / (self.put_per_s if write else self.get_per_s)


class Partition:
    """The keys from `first` up to the next partition's.

    weight: requests that each request here stands for. 1: the limit is a bucket of tokens. More:
    requests are a sample, and those that it stands for come at other moments. The load is then
    its mean of about `smooth_s`, and a request is refused at random, as often as the load demands.
    """

    def __init__(
        self, first: str, limits: Limits, weight: float, smooth_s: float, now_s: float
    ) -> None:
        self.first = first
        self.requests = self.refused = 0
        self._limits = limits
        self._weight = weight
        self._smooth_s = smooth_s
        self._free_s = -math.inf
        self._load = 0.0
        self._load_at_s = now_s
        self._recent: deque[str] = deque(maxlen=_RECENT_KEYS)
        self._look_s = now_s + _LOOK_S
        self._asked_s = 0.0
        self._busy_since_s = now_s

    def take(self, key: str, now_s: float, rng: random.Random, *, write: bool) -> bool:
        """Serve a request, or refuse it."""
        cost_s = self._limits.cost_s(write=write)
        self.requests += 1
        self._recent.append(key)
        self._asked_s += cost_s * self._weight
        served = (
            self._take_token(cost_s, now_s)
            if self._weight == 1
            else self._take_share(cost_s * self._weight, now_s, rng)
        )
        self.refused += not served
        return served

    def _take_token(self, cost_s: float, now_s: float) -> bool:
        free_s = max(self._free_s, now_s) + cost_s
        served = free_s <= now_s + self._limits.burst_s
        self._free_s = free_s if served else self._free_s + cost_s * self._limits.refused_share
        return served

    def _take_share(self, cost_s: float, now_s: float, rng: random.Random) -> bool:
        decay = math.exp((self._load_at_s - now_s) / self._smooth_s)
        self._load, self._load_at_s = self._load * decay + cost_s / self._smooth_s, now_s
        return rng.random() * self._load < 1.0

    def is_due(self, now_s: float) -> bool:
        """Whether it has been busy for so long that it splits."""
        if now_s < self._look_s:
            return False
        since_s = now_s - self._look_s + _LOOK_S
        if self._asked_s < self._limits.split_load * since_s:
            self._busy_since_s = now_s
        self._asked_s, self._look_s = 0.0, now_s + _LOOK_S
        return now_s - self._busy_since_s >= self._limits.split_after_s

    def median(self) -> str:
        """The key in the middle of those asked for lately."""
        return sorted(self._recent)[len(self._recent) // 2]

    def split(self, key: str, now_s: float) -> Partition:
        """Give up the keys from `key` on to a new partition."""
        self._recent = deque((k for k in self._recent if k < key), maxlen=_RECENT_KEYS)
        self._busy_since_s = now_s
        self._load /= 2
        other = Partition(key, self._limits, self._weight, self._smooth_s, now_s)
        other._load = self._load
        return other


class Partitions:
    """The partitions of a bucket, in the order of their keys.

    first: where partitions begin, beside the first, whose keys begin with nothing. weight,
    smooth_s: as in `Partition`.
    """

    def __init__(
        self,
        limits: Limits,
        rng: random.Random,
        *,
        first: Sequence[str] = (),
        weight: float = 1.0,
        smooth_s: float = 1.0,
    ) -> None:
        self.limits = limits
        self._rng = rng
        self._weight = weight
        self._firsts = ["", *sorted(first)]
        self.all = [Partition(key, limits, weight, smooth_s, 0.0) for key in self._firsts]
        self.splits_s: list[float] = []

    def take(self, key: str, now_s: float, *, write: bool) -> bool:
        """Serve a request for `key`, or refuse it: 503 SlowDown."""
        place = bisect_right(self._firsts, key) - 1
        partition = self.all[place]
        served = partition.take(key, now_s, self._rng, write=write)
        if partition.is_due(now_s) and (middle := partition.median()) > partition.first:
            self._firsts.insert(place + 1, middle)
            self.all.insert(place + 1, partition.split(middle, now_s))
            self.splits_s.append(now_s)
        return served
