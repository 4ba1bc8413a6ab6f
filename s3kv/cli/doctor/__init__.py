"""`s3kv doctor`: checks whether this host can use this bucket.

`bucket` tries the calls the cache makes; `disk` tries the directory of `disk_path`; `master_keys`
reads the keys of `encryption`; `host` checks memory and its limits, the installed packages and the
GPU. `findings` defines their results, and the remedies for errors of the store.
"""
