"""The shipped suite and faults on a scratch folder of a store, as a table.

``python -m reknit.testing.certify URL`` is the program that ``reknit certify-storage URL`` runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

from reknit.errors import StorageError
from reknit.plugins.store import open_storage
from reknit.testing import certified


class Result(NamedTuple):
    """The outcome of one test; `why` is empty where it passed."""

    part: str
    test: str
    outcome: str
    why: str


class _Watcher:
    """A pytest plugin that gives the tests their folder and collects the outcomes."""

    def __init__(self, scratch_url: str) -> None:
        self._scratch_url = scratch_url
        self.results: dict[str, Result] = {}
        self.places: list[str] = []
        """Names of the folders that were used."""

    @pytest.fixture
    def scratch_url(self) -> str:
        """Return a place in the store that no other test uses."""
        self.places.append(uuid.uuid4().hex[:8])
        return certified.below(self._scratch_url, self.places[-1])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.results.get(report.nodeid)
        if report.when != "call" and (report.passed or (known and known.outcome == "failed")):
            return
        _, part, test = report.nodeid.rsplit("::", 2)
        lines = [] if report.passed else report.longreprtext.splitlines()
        errors = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
        text = test.removeprefix("test_").replace("_", " ")
        why = errors[0] if errors else ""
        self.results[report.nodeid] = Result(part.removeprefix("Test").lower(), text, report.outcome, why)


def certify(url: str) -> list[Result]:
    """Run the suite and the faults in a scratch folder below `url`, which is emptied again.

    Passes on the errors of opening the store.
    """
    name = f"reknit-certify-{uuid.uuid4().hex[:12]}"
    scratch = certified.below(url, name)
    open_storage(scratch).close()
    watcher = _Watcher(scratch)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(Path(certified.__file__).parent)]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, "-c", "/dev/null", certified.__file__], plugins=[watcher])
    results = list(watcher.results.values())
    try:
        _leave_nothing(url, scratch, name, watcher.places)
    except StorageError as error:
        results.append(Result("scratch", f"{name} is emptied again", "failed", error.message))
    return results


def _leave_nothing(url: str, scratch: str, name: str, places: list[str]) -> None:
    """Delete the files that failed tests have left, and their folders where a store has folders."""
    certified.clear(scratch)
    storage = open_storage(url)
    folders = [f"{name}/{place}" for place in places]
    last = [f"{folder}/last" for inner in folders for folder in (f"{inner}/faults", inner)]
    # Deleting the last file of a folder other than the root takes the folder away.
    for path in last:
        storage.put(path, b"", if_absent=False)
    for path in last:
        storage.delete(path)
    storage.close()


def table(results: list[Result]) -> str:
    """Return the outcomes as text."""
    width = max((len(result.test) for result in results), default=0)
    lines = []
    for result in results:
        verdict = {"passed": "yes", "failed": "NO", "skipped": "not asked"}[result.outcome]
        lines.append(f"{result.part:8}  {result.test:{width}}  {verdict}")
        if result.why:
            lines.append(f"{'':10}{result.why}")
    failed = sum(result.outcome == "failed" for result in results)
    lines.append(f"\n{len(results) - failed} of {len(results)} hold")
    return "\n".join(lines)


def main() -> int:
    """Certify the store on the command line; 0 if all tests pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", metavar="URL", help="a folder or URL below which a scratch folder is made")
    results = certify(parser.parse_args().url)
    print(table(results))
    return 0 if results and all(result.outcome != "failed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
