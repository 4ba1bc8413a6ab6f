"""The `s3kv` command line: what an operator asks of a bucket. Needs `pip install 's3kv[cli]'`.

`app` holds the commands, or imports them from modules of their names; they only parse, run and
print. What they find out is in modules that need neither click nor rich: `doctor`, `inspection`,
`statistics`, `usage`, `catalogue`, `verification`, `sweep`.
"""
