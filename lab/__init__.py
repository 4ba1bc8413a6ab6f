"""A bench for the whole thing: small models, real vLLM engines in processes of their own, an S3.

Shared by the demo, the end-to-end tests and the benchmarks; not part of the package.
"""
