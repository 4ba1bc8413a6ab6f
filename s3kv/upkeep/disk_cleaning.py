"""Deletion of the files used longest ago, to keep a directory on a local disk within its budget.

The directory itself is the index of its files, and their modification times are their last uses.
So no state is kept between two cleanings or read at a start. Only one of the processes that share
the directory cleans it at a time.
"""

from __future__ import annotations

from contextlib import suppress

from s3kv.stores.disk import Directory
from s3kv.upkeep.ages import Ages

HIGH_SHARE = 0.95
"""Share of the budget above which files are deleted."""
LOW_SHARE = 0.85
"""Share of the budget that is then left."""


def is_crowded(directory: Directory, wanted_bytes: int = 0) -> bool:
    """Whether it is time to clean the directory, or its files have never been counted.
    wanted_bytes: length of an object that has to fit."""
    used, most = directory.used_bytes(), directory.most_bytes
    if used is None or used > HIGH_SHARE * most or most - used < wanted_bytes <= most:
        return True
    return directory.missing_bytes() > 0


def clean(directory: Directory, wanted_bytes: int = 0) -> int:
    """Count the directory's files, and delete the oldest ones if there are too many. Returns the
    bytes deleted; 0 if another process is cleaning it. Raises `OSError`."""
    with directory.cleaning() as is_mine:
        if not is_mine:
            return 0
        # In this order, a file renamed meanwhile is counted twice rather than never.
        before, unfinished, ages = directory.used_bytes(), directory.unfinished_bytes(), Ages()
        for file in directory.files():
            ages.add(file.used_s, file.nbytes)
        directory.correct(ages.nbytes + unfinished, before)
        if not is_crowded(directory, wanted_bytes):
            return 0
        most = directory.most_bytes
        left = min(int(LOW_SHARE * most), most - wanted_bytes if wanted_bytes <= most else most)
        if lacking := directory.missing_bytes():
            left = min(left, max(0, ages.nbytes - 2 * lacking))
        cut = ages.cut(max_bytes=left)
        deleted = 0
        for file in directory.files():
            if cut.takes(file.used_s, file.nbytes):
                with suppress(OSError):  # a file that cannot be deleted must not save the others
                    deleted += directory.delete(file.path)
        return deleted
