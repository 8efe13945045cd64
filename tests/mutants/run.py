"""Do tests notice mistakes in code that must not break?  ``python -m tests.mutants.run [PATTERN ...]``.

Each mutant is made in a copy of the tree, in which the tests that must notice it then run.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tests.mutants.catalog import CATALOG, SOURCES, Mutant, mutants

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
TEST_S = 40
"""A test that takes longer is stopped, and so fails."""
LIMIT_S = 120
"""The longest time of all tests of a mutant; then they are killed."""
_COPIED = ("src", "tests", "scripts", "docs", "examples", "benchmarks", "pyproject.toml")
_MARK = "REKNIT_MUTANTS"
"""Variable that marks every process that was started in a copy, including orphans."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::\S+)", re.MULTILINE)
_PASSED = re.compile(r"\b\d+ passed\b")


class Ending(NamedTuple):
    """The end of tests: `verdict` is passed, failed, skipped or broken; `by` is a failed test or a reason."""

    verdict: str
    by: str


class Result(NamedTuple):
    """The outcome of a mutant: killed, survived, stale or broken."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float

    @property
    def bad(self) -> bool:
        """Return whether it needs attention, which includes a known survivor that is killed by now."""
        return self.verdict != ("survived" if self.mutant.survives else "killed")

    def __str__(self) -> str:
        known = f" (known: {self.mutant.survives})" if self.mutant.survives else ""
        reported = self.verdict if self.verdict == "killed" else self.verdict.upper()
        by = f" by {self.by}" if self.verdict == "killed" else f": {self.by}" if self.by else ""
        return f"{self.seconds:5.1f} s  {self.mutant.room}: {self.mutant.name}: {reported}{by}{known}"


class Copy:
    """A copy of the tree in which mutants are made, one after another."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder
        folder.mkdir()
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)
        # Time stamps do not reveal a mutant of the same length, made in the same second.
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=hashed)
        (folder / "tmp").mkdir()
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "TMPDIR": str(folder / "tmp"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            _MARK: str(folder),
        }

    def judge(self, mutant: Mutant, limit_s: float = LIMIT_S) -> Result:
        """Make a mutant, run its tests, and restore the file."""
        began = time.monotonic()
        if (why := mutant.stale(self.root)) is not None:
            return Result(mutant, "stale", why, 0.0)
        path, original = self.root / SOURCES / mutant.file, mutant.read(self.root)
        path.write_text(mutant.mutated(self.root))
        try:
            tested = self.run(mutant.tests, limit_s, "-x")
        finally:
            path.write_text(original)
        verdict = {"passed": "survived", "failed": "killed"}.get(tested.verdict, "broken")
        return Result(mutant, verdict, tested.by, time.monotonic() - began)

    def run(self, tests: Sequence[str], limit_s: float, *options: str) -> Ending:
        """Run tests in the copy, and kill them after a limit."""
        plugins = ("-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", *plugins, "--hypothesis-seed=0"]
        command += [f"--timeout={TEST_S}", "--timeout-method=signal", *options, *tests]
        with tempfile.TemporaryFile("w+") as reported:
            started = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=reported,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = started.wait(limit_s)
            except subprocess.TimeoutExpired:
                return Ending("failed", f"the limit of {limit_s:.0f} s")
            finally:
                self._end_all()
                started.wait()
            reported.seek(0)
            output = reported.read()
        if status == 0 and _PASSED.search(output):
            return Ending("passed", "")
        if status == 0:
            return Ending("skipped", "all its tests were skipped, so none could notice it")
        if status < 0:
            return Ending("failed", f"signal {-status}")
        if status == 1 and (failed := _FAILED.findall(output)):
            hung = f" (after {TEST_S} s)" if "Failed: Timeout" in output else ""
            return Ending("failed", ", ".join(failed) + hung)
        return Ending("broken", "no test ran to its end; it said:\n" + output[-1500:])

    def _end_all(self) -> None:
        """Kill all processes that run in this copy, since agents outlive their parents."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == str(self.root):
                    process.kill()


def judge_all(
    root: Path, chosen: Sequence[Mutant], *, jobs: int = 1, limit_s: float = LIMIT_S
) -> list[Result] | Ending:
    """Return the outcome of each mutant, and print it at once, or the failure of tests without a mutant."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def tested(tests: Sequence[str]) -> Ending:
        copy = copies.get()
        try:
            return copy.run(tests, limit_s * max(len(chosen), 1))
        finally:
            copies.put(copy)

    def judge(mutant: Mutant) -> Result:
        copy = copies.get()
        try:
            result = copy.judge(mutant, limit_s)
        finally:
            copies.put(copy)
        print(result, flush=True)
        return result

    with tempfile.TemporaryDirectory(prefix="reknit-mutants-") as scratch, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copies.put(Copy(root, Path(scratch, str(number))))
        began, tests = time.monotonic(), named(root, chosen)
        for ending in pool.map(tested, [part for k in range(jobs) if (part := tests[k::jobs])]):
            if ending.verdict not in ("passed", "skipped"):
                return ending
        print(f"{time.monotonic() - began:5.1f} s  without a mutant all tests pass", flush=True)
        return list(pool.map(judge, chosen))


def named(root: Path, chosen: Sequence[Mutant]) -> list[str]:
    """Return the tests of those mutants that are not stale, each once, by file."""
    every = {test for mutant in chosen if not mutant.stale(root) for test in mutant.tests}
    return sorted(every - {test for test in every if "::" in test and test.partition("::")[0] in every})


def summary(results: Sequence[Result]) -> list[str]:
    """Return the number of killed mutants in each room, and the other mutants."""
    lines = []
    for room in dict.fromkeys(result.mutant.room for result in results):
        killed = [result.verdict == "killed" for result in results if result.mutant.room == room]
        lines.append(f"{room}: killed {sum(killed)} of {len(killed)}")
    lines.append(f"all: killed {sum(r.verdict == 'killed' for r in results)} of {len(results)}")
    for result in results:
        known = f" (known: {result.mutant.survives})" if result.mutant.survives else ""
        if result.verdict != "killed":
            lines.append(f"{result.verdict}: {result.mutant.room}: {result.mutant.name}{known}")
        elif known:
            lines.append(f"killed by now, so it did not survive: {result.mutant.room}: {result.mutant.name}")
    return lines


def main(arguments: Sequence[str], *, root: Path = ROOT, catalog: Path = CATALOG) -> int:
    """Run and print the outcomes, and return 0 if all mutants but the known survivors were killed."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("pattern", nargs="*", help="part of a room, a file or a name; without, all mutants")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    options = parser.parse_args(arguments)
    chosen = mutants(catalog, options.pattern)
    if options.list or not chosen:
        for mutant in chosen:
            print(f"{mutant.room}: {mutant.name} ({mutant.file}; {', '.join(mutant.tests)})")
        return 0 if chosen else 2
    began = time.monotonic()
    results = judge_all(root, chosen, jobs=options.jobs)
    if isinstance(results, Ending):
        print(f"tests fail without any mutant, so no mutant can be judged: {results.by}")
        return 2
    print("", *summary(results), f"took {time.monotonic() - began:.0f} s", sep="\n")
    return int(any(result.bad for result in results))


if __name__ == "__main__":
    # A signal ends it only after the running mutants, so that it leaves nothing behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
