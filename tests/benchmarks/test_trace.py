"""The trace simulation: its parts against what a hand can work out, the whole by its books."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace
from benchmarks.simulation.disk import BUFFER_BYTES, Disk
from benchmarks.simulation.fleet import BASELINES, OURS, Setup, percentiles_ms, run
from benchmarks.simulation.gpu import PagePool
from benchmarks.simulation.wire import Form, Link, Timeline
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival, block_hash, load
from s3kv.messages import JobKind

CHATS, TURNS = 12, 4


def write_trace(path: Path, *, gap_ms: int = 3_000, seed: int = 1) -> Path:
    """Chats that grow turn by turn behind one system prompt; four requests per time stamp."""
    rng = random.Random(seed)
    ids, histories, lines = itertools.count(1), [[0] for _ in range(CHATS)], []
    for turn in range(TURNS * CHATS):
        history = histories[turn % CHATS]
        history += [next(ids) for _ in range(rng.randrange(2, 12))]
        tail = rng.randrange(CHUNK_TOKENS)
        line = {
            "timestamp": turn // 4 * gap_ms,
            "input_length": len(history) * CHUNK_TOKENS + tail,
            "output_length": rng.randrange(1, 50),
            "hash_ids": history + ([next(ids)] if tail else []),
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


@pytest.fixture
def slow(tmp_path: Path) -> list[Arrival]:
    """The same with a minute between the requests."""
    return load(write_trace(tmp_path / "slow.jsonl", gap_ms=60_000))


FLEET = Setup(engines=5, routing="round-robin", host_gib=64.0, gpu_gib=4.0, recompute_gate="off")


def simulated(arguments: list[str], path: Path, out: Path) -> dict[str, Any]:
    trace.main(["--trace", str(path), "--engines", "2", "--json", str(out), *arguments])
    result: dict[str, Any] = json.loads(out.read_text())
    del result["command"]
    return result


def test_the_same_seed_gives_the_same_output(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = simulated(["--host-gib", "0.5", "2"], path, tmp_path / "1.json")
    printed = capsys.readouterr().out
    assert simulated(["--host-gib", "0.5", "2"], path, tmp_path / "2.json") == first
    assert capsys.readouterr().out == printed
    assert [run["policy"] for run in first["runs"]] == [*BASELINES, OURS, OURS]
    other = simulated(["--host-gib", "0.5", "2", "--seed", "1"], path, tmp_path / "3.json")
    assert other["runs"][2]["ttft_ms"] != first["runs"][2]["ttft_ms"]


@pytest.mark.parametrize("policy", [OURS, *BASELINES])
@pytest.mark.parametrize("routing", ["session", "round-robin"])
def test_every_prompt_token_comes_from_somewhere(path: Path, policy: str, routing: str) -> None:
    arrivals = load(path)
    figures = run(arrivals, Setup(engines=2, host_gib=0.5, gpu_gib=4.0, routing=routing), policy)
    # A prompt found as a whole has its last token computed again.
    again = sum(figures["tokens"].values()) - sum(a.prompt_tokens for a in arrivals)
    assert 0 <= again <= len(arrivals)


def test_with_room_and_time_for_everything_nothing_is_computed_twice(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "slow.jsonl", gap_ms=3_600_000))
    setup = Setup(engines=1, host_gib=64.0, gpu_gib=4.0)
    seen: set[bytes] = set()
    known_tokens = 0
    for arrival in arrivals:
        known_tokens += sum(h in seen for h in arrival.hashes) * CHUNK_TOKENS
        seen.update(arrival.hashes)
    figures = run(arrivals, setup, "lru")
    tokens = figures["tokens"]
    assert tokens["gpu"] + tokens["host"] + tokens["bucket"] == known_tokens
    assert tokens["host"] > 0
    assert figures["requests"]["put_new"] == len(seen)
    assert figures["gib_stored"] == pytest.approx(len(seen) / 16, abs=0.2)
    assert figures["saves_dropped"] == figures["evictions"] == 0


def test_engines_find_in_the_bucket_what_others_have_saved(slow: list[Arrival]) -> None:
    figures = run(slow, FLEET, "lru")
    # Five engines and twelve chats in turn: consecutive turns are never on the same engine.
    assert figures["tokens"]["bucket"] > figures["tokens"]["host"]
    assert figures["requests"]["get_404"] > 0
    assert figures["wait_ms"]["p50"] > 0
    assert run(slow, FLEET, "device only")["requests"]["get_hit"] == 0


def test_compressed_objects_take_less_of_the_budget_and_of_the_wire(slow: list[Arrival]) -> None:
    setup = replace(FLEET, first_byte_sigma=0.0)
    plain = run(slow, setup, "lru")
    small = run(slow, replace(setup, stored_share=0.5), "lru")
    assert small["stored_share"] == 0.5
    assert small["tokens"] == plain["tokens"], "there is room for all of them"
    assert small["requests"]["put_new"] == plain["requests"]["put_new"]
    for figure in ("gib_down", "gib_up", "gib_stored"):
        assert small[figure] == pytest.approx(plain[figure] / 2, abs=0.1)
    storage = small["usd_per_month"]["storage"] / plain["usd_per_month"]["storage"]
    assert storage == pytest.approx(0.5, abs=0.01)
    # 64 MiB at 90 MB/s a connection: the other half arrives before the last segment is decoded.
    assert small["wait_ms"]["p50"] < plain["wait_ms"]["p50"]
    tight = replace(setup, bucket_gib=8.0)
    evicting, roomier = (run(slow, replace(tight, stored_share=s), "lru") for s in (1.0, 0.5))
    assert 0 < roomier["kept"]["deleted"] < evicting["kept"]["deleted"]
    assert roomier["tokens"]["bucket"] > evicting["tokens"]["bucket"]


def test_a_form_waits_for_its_codec_if_it_has_one() -> None:
    layout = Setup().layout
    assert Form.of(layout, 1.0) == Form(layout.object_bytes)
    form = Form.of(layout, 0.7)
    assert form.nbytes == pytest.approx(0.7 * layout.object_bytes, rel=1e-6)
    assert 0 < form.decode_s < 0.001 < form.encode_s < 1.0


def test_a_disk_spares_gets_and_second_writes_only_what_was_fetched(slow: list[Arrival]) -> None:
    figures = []
    for disk_gib, admission in (0.0, "all"), (64.0, "all"), (64.0, "fetched"):
        setup = replace(FLEET, engines_per_host=5, disk_gib=disk_gib, disk_admission=admission)
        figures.append(run(slow, setup, "lru"))
    none, everything, second = figures
    assert none["disk"]["tb_per_day"] == none["tokens"]["disk"] == 0
    found = [sum(run["tokens"][tier] for tier in ("disk", "bucket")) for run in figures]
    assert found == [none["tokens"]["bucket"]] * 3, "the disk only is nearer"
    # All of it is on the one host's disk, so no object is fetched.
    assert everything["requests"]["get_hit"] == everything["tokens"]["bucket"] == 0
    assert everything["disk"]["writes"] == everything["requests"]["put_new"]
    assert second["disk"]["writes"] == second["requests"]["get_hit"] > 0
    assert second["disk"]["reads"] + second["requests"]["get_hit"] == none["requests"]["get_hit"]
    assert everything["disk"]["tb_per_day"] > second["disk"]["tb_per_day"] > 0


def test_a_disk_takes_time_has_limited_room_and_drops_what_it_cannot_write() -> None:
    timeline = Timeline()
    ends: list[float] = []
    nbytes = BUFFER_BYTES // 2
    disk = Disk(timeline, nbytes, 10 * nbytes, nbytes, "all")
    for number in range(9):  # a second each
        timeline.at(float(number), partial(disk.offer, bytes([number]), JobKind.UPLOAD))
    timeline.at(9.0, lambda: ends.append(disk.read(b"\0", lambda: ends.append(timeline.now_s))))
    for key in (b"a", b"b", b"c"):
        timeline.at(20.0, partial(disk.offer, key, JobKind.FETCH))
    timeline.run()
    assert ends == [True, pytest.approx(10.0001)]
    assert disk.counts == {"writes": 11, "reads": 1, "dropped": 1, "evicted": 2}
    held = [key for number in range(9) if disk.read(key := bytes([number]), lambda: None)]
    assert held == [b"\0", *(bytes([number]) for number in range(3, 9))]
    picky = Disk(timeline, nbytes, 10 * nbytes, nbytes, "fetched")
    picky.offer(b"a", JobKind.UPLOAD)
    picky.offer(b"b", JobKind.FETCH)
    timeline.run()
    assert picky.counts == {"writes": 1}


def test_a_request_that_fits_no_device_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu_gib is 0\.25"):
        run(load(path), Setup(gpu_gib=0.25), "lru")


def test_arrivals_are_spread_and_chats_stay_where_they_are(path: Path) -> None:
    arrivals = load(path)
    assert [a.time_s for a in arrivals[:6]] == [0, 0.75, 1.5, 2.25, 3, 3.75]
    assert [len(a.hashes) for a in arrivals] == [a.prompt_tokens // 512 for a in arrivals]
    chats = [{a.engine(8, "session") for a in arrivals[chat::CHATS]} for chat in range(CHATS)]
    assert all(len(engines) == 1 for engines in chats)
    assert len(set.union(*chats)) > 1
    assert [a.engine(5, "round-robin") for a in arrivals[:6]] == [0, 1, 2, 3, 4, 0]


def test_a_trace_out_of_order_is_refused(path: Path) -> None:
    path.write_text("\n".join(reversed(path.read_text().splitlines())))
    with pytest.raises(ValueError, match="sort the trace"):
        load(path)


def test_a_link_is_shared_equally_and_no_connection_gets_more_than_its_own() -> None:
    timeline, ends = Timeline(), []
    link = Link(timeline, bytes_per_s=100.0, connection_bytes_per_s=60.0)

    def start(name: str, nbytes: int) -> None:
        link.carry(nbytes, lambda: ends.append((name, round(timeline.now_s, 6))))

    timeline.at(0.0, lambda: start("a", 160))  # alone 60/s until 1.0: 100 are left
    timeline.at(1.0, lambda: start("b", 50))  # both 50/s until 2.0
    timeline.run()
    assert ends == [("b", 2.0), ("a", round(2.0 + 50 / 60, 6))]


def test_pages_go_tail_first_and_come_back_by_their_prefix() -> None:
    pool = PagePool(4, keeps=True)
    chat = [block_hash(i) for i in range(3)]
    pages = pool.take([], 3)
    for page, key in zip(pages, chat, strict=True):
        pool.fill(page, key)
    assert pool.take([], 2) is None
    pool.give_back(pages)
    assert pool.take([], 2) is not None  # the page never used, then the tail
    assert pool.hit(chat, 10_000, CHUNK_TOKENS) == pages[:2]
    assert pool.hit(chat, CHUNK_TOKENS, CHUNK_TOKENS) == []  # its last token is always computed
    assert pool.take(pages[:2], 3) is None
    assert pool.take(pages[:2], 2) == pages[:2]


def test_percentiles_by_nearest_rank() -> None:
    assert percentiles_ms([0.004, 0.001, 0.003, 0.002], 50, 95) == {"p50": 2.0, "p95": 4.0}
    assert percentiles_ms([], 50) == {"p50": 0.0}


def test_a_request_without_a_second_chunk_has_no_session() -> None:
    assert 0 <= Arrival(7, 0.0, 100, 1, (), -7).engine(8, "session") < 8
