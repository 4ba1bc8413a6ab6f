"""`s3kv doctor`: whether this host can use this bucket.

`bucket` makes every call the cache makes. `host` looks at memory and its limits, `software` at what
is installed and at the GPU. `findings` is what they find, `remedies` what to do about an error of
the store. `command` is the one module here that needs click.
"""
