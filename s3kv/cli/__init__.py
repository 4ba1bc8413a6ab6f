"""The `s3kv` command line, with which an operator works on a bucket. Needs
`pip install 'vllm-s3kv[cli]'`.

Each command is in the module of its name (`config` in `configure`); `walk` lists a bucket for them,
`invocation` has the options they share, `show` prints, `billing` computes for `cost`.
"""
