"""The I/O process: all S3 traffic of one worker, outside of the engine's interpreter.

`client` and `child` run in the worker, `server` in the I/O process; `wire` is the protocol between
them. Nothing here imports torch, vLLM or numpy.
"""
