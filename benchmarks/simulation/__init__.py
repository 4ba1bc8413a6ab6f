"""A fleet of engines over one bucket in simulated time, around the real planner.

    workload.py   the requests of a trace, when they arrive and at which engine
    wire.py       time, the network, the bucket and each engine's I/O process
    gpu.py        the engine's own prefix cache
    engine.py     vLLM's loop, as far as a KV connector sees it
    belady.py     the best that any order of eviction could have done
    expiry.py     a bucket with a budget, swept and refreshed as s3kv does it
    fleet.py      one run of it all, and what came of it

For fleets on a bucket with limits (`benchmarks/replicas.py`):

    s3.py         S3's partitions: their limits, SlowDown, and how they split
    scaled.py     the trace for more or fewer replicas, and for a sample of them
    service.py    s3kv's own I/O service in simulated time, over that bucket
    replicas.py   one run of it all, and what came of it

`benchmarks/trace.py` and `benchmarks/replicas.py` say what the models leave out.
"""
