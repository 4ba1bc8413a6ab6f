"""The `s3kv` command line, for operators of a bucket. Needs `pip install 'vllm-s3kv[cli]'`.

Each command is in the module of its name (`config` in `configure`); `walk` lists a bucket for them,
`invocation` has their common options, `show` prints, `billing` computes for `cost`.
"""
