"""Where do tests that need a device run?  Here if there is a real one, else beside a simulated one.

The simulated device changes torch for the rest of a process.  So all such tests of a file run in one fork of
a process that has it (`tests.ranks`), which sends their reports here.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import accelerator as simulated
from tests.devices import WARM
from tests.ranks import Died, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.accelerator import Accelerator

_PROFILE = "--hypothesis-profile"
_TIMEOUT_S = 250.0
_FIRST_TIMEOUT_S = 900
"""The timeout of a test, since the first one may build the device while other tests use the cores."""

_REPORTS = pytest.StashKey[dict[str, list[pytest.TestReport]]]()


@pytest.fixture
def accelerator() -> Accelerator:
    """Return the controls of the simulated device."""
    device = simulated.installed()
    assert device is not None, "mark the test with one of tests.devices"
    return device


@pytest.fixture(autouse=True)
def _at_rest() -> Iterator[None]:
    """Leave the simulated device without work, errors and refusals."""
    yield
    if (device := simulated.installed()) is not None:
        device.reset()


def pytest_configure(config: pytest.Config) -> None:
    """Make a place for reports from elsewhere."""
    config.stash[_REPORTS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that run elsewhere enough time to build the device."""
    for item in items:
        if item.get_closest_marker("device") is not None:
            item.add_marker(pytest.mark.timeout(_FIRST_TIMEOUT_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Report the outcome of a test elsewhere, or let it run here."""
    warm = needed(item)
    if warm is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, warm):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)
    return True


def needed(item: pytest.Item) -> str | None:
    """Return the module of `tests.warm` that a test needs elsewhere; None if it can run here."""
    mark = item.get_closest_marker("device")
    if mark is None or simulated.installed() is not None:
        return None
    if mark.args[0] == "cuda" and sys.modules["torch"].cuda.is_available():
        return None
    return WARM[mark.args[0]]


def _reports(item: pytest.Item, warm: str) -> list[pytest.TestReport]:
    if reason := simulated.why_not():
        return [_report(item, "skipped", (str(item.path), 0, f"Skipped: {reason}"))]
    known = item.config.stash[_REPORTS]
    if item.nodeid not in known:
        left = [other for other in item.session.items if other.path == item.path and needed(other) == warm]
        _run([item, *(other for other in left if other is not item and other.nodeid not in known)], warm)
    return known[item.nodeid]


def _report(item: pytest.Item, outcome: Any, text: Any) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, text, "setup"
    )


def _run(items: list[pytest.Item], warm: str) -> None:
    """Run tests elsewhere, and keep the reports of all that began."""
    config = items[0].config
    with tempfile.TemporaryDirectory(prefix="reknit-elsewhere-") as folder:
        names = [item.nodeid for item in items]
        options = [option for plugin in config.option.plugins for option in ("-p", plugin)]
        if profile := config.getoption(_PROFILE, None):
            options.append(f"{_PROFILE}={profile}")
        call = (in_fork, names, options, folder, str(config.rootpath))
        answer = run(1, *call, warm=warm, timeout=_TIMEOUT_S, some_die=True, joined=False)[0]
        written = Path(folder, "reports").read_bytes() if Path(folder, "reports").exists() else b""
        output = Path(folder, "output").read_text(errors="replace")[-4000:]
    known = config.stash[_REPORTS]
    begun = items[0].nodeid
    for kind, value in _unpickled(written):
        if kind == "began":
            begun = value
            known[begun] = []
        else:
            report = config.hook.pytest_report_from_serializable(config=config, data=value)
            known[report.nodeid].append(report)
    ended = {name for name in names if any(one.when == "teardown" for one in known.get(name, []))}
    # A crash ends one test, and the others run in another process.  Any other failure ends all.
    crashed = isinstance(answer, Died)
    how = f"ended with code {answer.code}" if crashed else f"returned {answer}"
    for item in items:
        if item.nodeid not in ended and (item.nodeid == begun or not crashed):
            known[item.nodeid] = [_report(item, "failed", f"the process of this test {how}\n{output}")]


def _unpickled(data: bytes) -> Iterator[tuple[str, Any]]:
    while data:
        size = int.from_bytes(data[:8], "little")
        if len(data) < 8 + size:
            return
        yield pickle.loads(data[8 : 8 + size])
        data = data[8 + size :]


# In the other process.


class Recorder:
    """Writes the name of each test when it begins, and each report at once."""

    def __init__(self, folder: str) -> None:
        self._file = open(os.path.join(folder, "reports"), "wb", buffering=0)  # noqa: SIM115
        self._config: Any = None

    def _write(self, kind: str, value: Any) -> None:
        data = pickle.dumps((kind, value))
        self._file.write(len(data).to_bytes(8, "little") + data)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the configuration, which turns reports into data."""
        self._config = config

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins."""
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a report."""
        hook = self._config.hook
        self._write("report", hook.pytest_report_to_serializable(config=self._config, report=report))


def in_fork(names: list[str], more: list[str], folder: str, root: str) -> int:
    """Run tests in this process; their output goes to a file."""
    os.chdir(root)
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    # The module of `tests.warm` has already imported modules that pytest would rewrite.
    options = [
        "-o",
        "faulthandler_timeout=0",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    return int(pytest.main([*names, *options, *more], plugins=[Recorder(folder)]))
