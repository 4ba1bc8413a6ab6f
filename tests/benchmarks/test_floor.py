"""The floor of the benchmarks, read from a server that closes the connection after every answer."""

from __future__ import annotations

from benchmarks.floor import AT_ONCE, TIMES, Server
from lab.s3 import moto_process


def test_a_server_that_closes_every_connection_is_read_to_the_end() -> None:
    with moto_process() as s3:
        client = s3.client()
        client.create_bucket(Bucket="bench")
        for number in range(2 * max(AT_ONCE)):
            client.put_object(Bucket="bench", Key=f"p/{number:02}.safetensors", Body=b"a" * 100_000)
        server = Server(s3.url, "bench", s3.env)
        assert server.told() == {"connections": None, "batches": 0, "median_ms": None}
        server.read("p/", 2 * max(AT_ONCE))
    told = server.told()
    assert told["batches"] == TIMES
    assert told["connections"] in AT_ONCE
    assert told["median_ms"] > 0
