"""A NameNode of two is killed during saves and loads: all is whole, or fails in time, and a retry works.

Starts two NameNodes that share their edits, and a DataNode, from the files of ``scripts/servers up hdfs``.
Clients use the common name of both NameNodes.

Run: python -m tests.nightly.hdfs_ha [--kills 3]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit.errors import ReknitError, StorageUnavailableError
from reknit.options import MIB
from tests.nightly.hdfs_pair import Pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


NBYTES = 48 * MIB
TIMEOUT_S = 4
"""The longest time of one request."""
LIMIT_S = 60.0
"""The longest time of a save or a load in which a NameNode is killed."""
NOBODY_S = 3 * TIMEOUT_S
"""The longest time of an error without an active NameNode: for the request, and to abort the file."""
HANGS_S = 300.0
PLAIN = f"?part_mib=1&block_mib=1&timeout_s={TIMEOUT_S}&tries=8&retry_s=0"
"""Options without retries, except by the upload of a sub-file."""
PATIENT = PLAIN.replace("retry_s=0", "retry_s=40")
OPTIONS = reknit.SaveOptions(threads=2)


def state_of(version: int) -> dict[str, Any]:
    """Return a state in which every value is the version."""
    w = np.random.default_rng(version).integers(0, 256, NBYTES, np.uint8)
    return {"model": {"w": w}, "extra": {"version": version}}


def save(name: str, version: int, query: str = PLAIN) -> None:
    """Save a version, over any other."""
    reknit.save(
        f"hdfs://pair/{name}{query}", state_of(version), step=version, overwrite=True, options=OPTIONS
    )


def version_at(name: str, query: str = PLAIN) -> int:
    """Load, and return the version, which must be the same in all values."""
    target = state_of(99)
    report = reknit.load(f"hdfs://pair/{name}{query}", target)
    version = report.step
    assert version is not None
    expected = state_of(version)
    assert np.array_equal(target["model"]["w"], expected["model"]["w"])
    assert target["extra"] == expected["extra"]
    return version


@contextmanager
def during(delay_s: float, action: Callable[[], object]) -> Iterator[None]:
    """Do something while the block runs, wait for both, and raise its error."""
    failed: list[BaseException] = []

    def work() -> None:
        time.sleep(delay_s)
        try:
            action()
        except BaseException as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failed:
        raise failed[0]


def outcome(work: Callable[[], object], limit_s: float) -> tuple[ReknitError | None, float]:
    """Return the typed error of some work, or None, and its seconds, which must not exceed a limit."""
    begin, error = time.monotonic(), None
    try:
        work()
    except StorageUnavailableError as found:
        error = found
    seconds = time.monotonic() - begin
    assert seconds < limit_s, f"it took {seconds:.1f} s"
    return error, seconds


def reported(error: ReknitError | None, seconds: float) -> str:
    how = "completes" if error is None else f"fails ({str(error).splitlines()[0][:90]})"
    return f"{how} after {seconds:.1f} s"


def a_save_and_a_load(pair: Pair, kills: int) -> Iterator[str]:
    """Save and load with either NameNode first, also by the requests that the client does not support."""
    for version in range(2):
        begin = time.monotonic()
        save("first", version)
        saved = time.monotonic()
        assert version_at("first") == version
        loaded = time.monotonic()
        yield f"{pair.active} active: save {saved - begin:.1f} s, load {loaded - saved:.1f} s"
        pair.fail_over()
        pair.restore()


def a_save_while_the_active_one_is_killed(pair: Pair, kills: int, query: str = PLAIN) -> Iterator[str]:
    """Check that the old or the new checkpoint is there afterwards, and that the next save works."""
    for k in range(kills):
        name = f"save-{k}-{query[-2:]}"
        save(name, 0)
        begin = time.monotonic()
        save(name, 1)
        delay_s = (time.monotonic() - begin) * (k + 0.5) / kills
        with during(delay_s, pair.fail_over):
            error, seconds = outcome(partial(save, name, 2, query), LIMIT_S)
        version = version_at(name)
        assert version == 2 if error is None else version in (1, 2)
        assert error is None or query is PLAIN, error
        save(name, 2)
        assert version_at(name) == 2
        assert reknit.verify(f"hdfs://pair/{name}{PLAIN}", "data").ok
        yield f"killed after {delay_s:.2f} s: {reported(error, seconds)}, version {version}"
        pair.restore()


def a_patient_save_while_the_active_one_is_killed(pair: Pair, kills: int) -> Iterator[str]:
    """Check that a save with retries succeeds."""
    yield from a_save_while_the_active_one_is_killed(pair, kills, PATIENT)


def a_load_while_the_active_one_is_killed(pair: Pair, kills: int) -> Iterator[str]:
    """Check that a load is right or fails, and that the next one is right."""
    save("load", 7)
    for k in range(kills):
        for query in (PLAIN, PATIENT):
            delay_s = 0.02 + 0.1 * k
            with during(delay_s, pair.fail_over):
                error, seconds = outcome(partial(version_at, "load", query), LIMIT_S)
            assert error is None or query is PLAIN, error
            assert version_at("load") == 7
            patience = "patient, " if query is PATIENT else ""
            yield f"{patience}killed after {delay_s:.2f} s: {reported(error, seconds)}"
            pair.restore()


def nobody_is_active(pair: Pair, kills: int) -> Iterator[str]:
    """Check that everything fails with typed errors and in time, and works again with an active NameNode."""
    save("nobody", 3)
    for dead in ("active", "both"):
        assert pair.active is not None
        pair.kill(*(("nn1", "nn2") if dead == "both" else (pair.active,)))
        works: dict[str, Callable[[], object]] = {
            "save": partial(save, "new", 4),
            "overwrite": partial(save, "nobody", 4),
            "load": partial(version_at, "nobody"),
            "latest": partial(reknit.latest, f"hdfs://pair/{PLAIN}"),
        }
        for name, work in works.items():
            error, seconds = outcome(work, NOBODY_S)
            assert error is not None, name
            yield f"{dead} dead: {name} {reported(error, seconds)}"
        if dead == "active":
            pair.promote(pair.standby)
            assert version_at("nobody") == 3
        else:
            pair.active = None
        pair.restore()
        assert version_at("nobody") == 3


def the_active_one_goes_silent(pair: Pair, kills: int) -> Iterator[str]:
    """Check that the other NameNode takes over when the active one stops answering, as without power.

    Only the first request of each store may wait for the silent one.
    """
    for silent in ("nn1", "nn2"):
        assert pair.active == silent
        save("silent", 5)
        pair.send(silent, signal.SIGSTOP)
        pair.promote(pair.standby)
        works: dict[str, Callable[[], object]] = {
            "save": partial(save, "silent", 6, PATIENT),
            "load": partial(version_at, "silent", PATIENT),
        }
        for name, work in works.items():
            error, seconds = outcome(work, LIMIT_S)
            assert error is None, error
            yield f"{silent} silent: {name} {reported(error, seconds)}"
        pair.kill(silent)  # it would go on as the active one, which fencing prevents elsewhere
        pair.restore()
        assert version_at("silent") == 6


CHECKS = (
    a_save_and_a_load,
    nobody_is_active,
    the_active_one_goes_silent,
    a_save_while_the_active_one_is_killed,
    a_patient_save_while_the_active_one_is_killed,
    a_load_while_the_active_one_is_killed,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=3, help="moments at which a NameNode is killed")
    parser.add_argument("--only", help="a word in the name of the checks to run")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="reknit-pair-") as folder:
        pair = Pair(Path(folder) / "hdfs")
        os.environ["HADOOP_CONF_DIR"] = pair.server["conf"]
        try:
            for check in CHECKS:
                if arguments.only is not None and arguments.only not in check.__name__:
                    continue
                print(f"-- {check.__name__.replace('_', ' ')}", flush=True)
                faulthandler.dump_traceback_later(HANGS_S * arguments.kills, exit=True)
                try:
                    for line in check(pair, arguments.kills):
                        print(f"   {line}", flush=True)
                except (AssertionError, ReknitError):
                    failed += 1
                    traceback.print_exc()
                    pair.restore()
        finally:
            pair.end()
            faulthandler.cancel_dump_traceback_later()
    print(f"{len(CHECKS)} checks, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
