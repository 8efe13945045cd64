"""Did the tests of a folder cost more than their budget in ``budgets.py``?

Seconds depend on the machine, so a folder exceeds its budget by the number of Python processes that began,
directly or indirectly, and by the servers it used.  Each run prints the costs of its folders, and fails if a
folder exceeds its budget.  A night has more cases, and no budgets.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.running.budgets import BUDGETS, Budget
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS = Path(__file__).parent / "starts"


@dataclass
class Cost:
    """The costs of the tests of one folder."""

    tests: int = 0
    seconds: float = 0.0
    processes: int = 0
    servers: set[str] = field(default_factory=set)

    def beyond(self, budget: Budget) -> list[str]:
        """Return descriptions of the costs that exceed a budget."""
        found = []
        if self.processes > budget.processes:
            found.append(f"{self.processes} processes instead of {budget.processes}")
        if unknown := self.servers - set(budget.servers):
            found.append(f"the servers {', '.join(sorted(unknown))}")
        return found


class Costs:
    """The costs of the tests of this process, by folder."""

    def __init__(self) -> None:
        self.by_folder: defaultdict[str, Cost] = defaultdict(Cost)
        self.running = ""
        self._started = ""

    def count(self) -> None:
        """Count the processes that begin from now on."""
        handle, self._started = tempfile.mkstemp(prefix="reknit-starts-")
        os.close(handle)
        os.environ["REKNIT_TEST_STARTS"] = self._started
        sys.path.append(str(_STARTS))  # agents and workers of loaders get this for their PYTHONPATH
        paths = [str(_STARTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def num_processes(self) -> int:
        """Return the number of processes that began so far."""
        return os.path.getsize(self._started)

    def end(self) -> None:
        """Stop counting."""
        os.unlink(self._started)

    def merge(self, others: dict[str, dict[str, Any]]) -> None:
        """Add the costs of another process's tests."""
        for folder, other in others.items():
            mine = self.by_folder[folder]
            mine.tests += other["tests"]
            mine.seconds += other["seconds"]
            mine.processes += other["processes"]
            mine.servers |= set(other["servers"])


COSTS = Costs()


def use_server(name: str) -> None:
    """Record that the running test uses a server."""
    COSTS.by_folder[COSTS.running].servers.add(name)


def folder_of(nodeid: str) -> str:
    """Return the folder of a test, as ``budgets.py`` has it."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def pytest_configure() -> None:
    """Begin counting."""
    COSTS.count()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the costs of a test."""
    COSTS.running = folder_of(item.nodeid)
    processes, began = COSTS.num_processes(), time.monotonic()
    result = yield
    cost = COSTS.by_folder[COSTS.running]
    cost.tests += 1
    cost.seconds += time.monotonic() - began
    cost.processes += COSTS.num_processes() - processes
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the costs of the tests of a lane."""
    COSTS.merge(getattr(node, "workeroutput", {}).get("costs", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the costs to the controlling process, or fail there if a folder exceeds its budget."""
    COSTS.end()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = {
            folder: asdict(cost) | {"servers": sorted(cost.servers)}
            for folder, cost in COSTS.by_folder.items()
        }
    elif session.exitstatus == pytest.ExitCode.OK and _outgrown():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the costs of the folders, the most expensive first."""
    reporter = terminalreporter
    reporter.section("tests by folder: seconds (aim), processes (budget)")
    for folder, cost in sorted(COSTS.by_folder.items(), key=lambda row: -row[1].seconds):
        budget = BUDGETS.get(folder, Budget())
        reporter.line(
            f"{folder:12} {cost.tests:5} tests {cost.seconds:6.0f} s ({budget.seconds:4})"
            f" {cost.processes:5} ({budget.processes:4})  {' '.join(sorted(cost.servers))}"
        )
    for line in _outgrown():
        reporter.line(f"FAILED {line}", red=True)


def _outgrown() -> list[str]:
    if is_night():
        return []
    return [
        f"tests/{folder} outgrew tests/running/budgets.py: {', '.join(beyond)}"
        for folder, cost in sorted(COSTS.by_folder.items())
        if (beyond := cost.beyond(BUDGETS.get(folder, Budget())))
    ]
