"""The `s3kv` command line: what an operator asks of a bucket. Needs `pip install 's3kv[cli]'`.

`app` holds the commands, which only parse, run and print. What they find out is in modules of their
own, which need neither click nor rich: `doctor`, `inspection`, `usage`.
"""
