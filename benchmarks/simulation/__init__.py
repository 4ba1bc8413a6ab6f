"""A fleet of engines over one bucket in simulated time, around the real planner.

    workload.py   the requests of a trace, when they arrive and at which engine
    wire.py       time, the network, the bucket and each engine's I/O process
    gpu.py        the engine's own prefix cache
    engine.py     vLLM's loop, as far as a KV connector sees it
    expiry.py     a bucket with a budget, swept and refreshed as s3kv does it
    fleet.py      one run of it all, and what came of it

`benchmarks/trace.py` says what the models leave out.
"""
