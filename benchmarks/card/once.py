"""A pytest plugin for tests that take longer than a run may: a later run leaves out what has passed.

    pytest -p benchmarks.card.once --once FILE --once-seconds N …

FILE gets the name of each test that passed or was skipped, as soon as it has. Tests marked slow come last.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

OUT_OF_TIME = "out of time"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--once", type=Path, required=True, help="what has passed")
    parser.addoption("--once-seconds", type=float, default=1e9, help="start no test after so many")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Once(config))


class Once:
    def __init__(self, config: pytest.Config) -> None:
        self._record: Path = config.getoption("--once")
        self._end = time.monotonic() + config.getoption("--once-seconds")
        # pytest-xdist's processes must all collect the same tests, so the first one tells them what it read.
        given = getattr(config, "workerinput", None)
        self._is_first = given is None
        self.known: set[str] = set(given["once"] if given else [])
        if self._is_first and self._record.exists():
            self.known = set(self._record.read_text().splitlines())
        self._failed: set[str] = set()
        self._session: Any = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["once"] = sorted(self.known)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.known])
        items[:] = [item for item in items if item.nodeid not in self.known]
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._is_first:
            return
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when != "teardown":
            return
        if report.nodeid not in self._failed:
            with self._record.open("a") as file:
                file.write(report.nodeid + "\n")
        if time.monotonic() > self._end:
            for session in (self._session, self._session.config.pluginmanager.getplugin("dsession")):
                if session is not None:
                    session.shouldstop = OUT_OF_TIME

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_whole = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and bool(self.known)
        if is_whole or session.shouldstop == OUT_OF_TIME:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self._failed else pytest.ExitCode.OK
