"""The I/O process: all S3 traffic of one worker, outside of the engine's interpreter.

`client` and `child` run in the worker; `process`, `jobs` and `transfers` in the I/O process; `wire`
is what they say to each other. Nothing here imports torch, vLLM or numpy.
"""
