"""The record of a run: the last run that opened a folder for writing owns its steps.

Each run that opens the folder puts a file there whose name has its generation, higher than those before, and
deletes theirs.  It is written once and never changes: the signs of life of the run are files beside it
(`heartbeat`).  A save of a run puts its marker up before it reads the records (`marker`), and who opens the
folder deletes markers after it has put its own there.  So of two runs that meet, either the older one finds
the record, or the newer one its marker (docs/decisions/0021).

The record also has the line of descent of the steps there, which each run takes over from the one before.  A
run that goes back to an earlier step opens its folder again, with a higher generation and the same identity:
its own saves from before may still commit, but on a branch that is given up (docs/decisions/0022).

A run that goes back to an earlier step leaves the later ones on another branch.  Each save has a generation,
so a branch needs no list of steps: it has the saves from its generation on, up to that of the next branch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
import uuid
from contextlib import closing, suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from reknit.errors import (
    CommitError,
    FencedError,
    FormatError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
)
from reknit.events.phase import now
from reknit.format import paths
from reknit.system import dice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from reknit.storage.base import Storage


class Branch(NamedTuple):
    """The saves from a generation on, which continue after a `step` of a save of generation `parent`."""

    generation: int
    parent: int
    step: int


class Start(Struct, frozen=True):
    """The step after which a branch begins, and the generation of its save."""

    step: int
    generation: int | None


class _Span(Struct, frozen=True):
    """A part of a line: generations from `first` to before `end`, and numbers above `above` up to `upto`."""

    first: int
    end: float
    above: int
    upto: float

    def holds(self, generation: int, step: int) -> bool:
        """Return whether a step lies in this part."""
        return self.first <= generation < self.end and self.above < step <= self.upto


_FIRST = -1
"""Lowest generation: that of a save whose manifest has none."""


class Line:
    """The line of descent of the newest branch; without branches, all steps are on it."""

    def __init__(self, branches: Iterable[Branch] = ()) -> None:
        self.branches = tuple(sorted(branches))
        self._spans = _spans(self.branches)

    def holds(self, generation: int | None, step: int | None) -> bool:
        """Return whether a step that a save of some generation made is on the line."""
        made = _FIRST if generation is None else generation
        return step is None or any(span.holds(made, step) for span in self._spans)

    def is_begun(self, generation: int | None, step: int | None) -> bool:
        """Return whether a step on the line shows that its newest branch has a committed step."""
        if not self.branches or generation is None or step is None:
            return not self.branches
        return generation >= self.branches[-1].generation and self.holds(generation, step)

    def before(self) -> Line:
        """Return the line before its newest branch."""
        return Line(self.branches[:-1])

    def after(self, branch: Branch) -> Line:
        """Return the line of a branch that begins now; branches of its generation or later end there."""
        return Line([*(each for each in self.branches if each.generation < branch.generation), branch])

    def branched(self, start: Start | None, generation: int) -> Line:
        """Return the line of a branch of a generation that begins after a step; without one this line."""
        if start is None:
            return self
        parent = _FIRST if start.generation is None else start.generation
        return self.after(Branch(generation, parent, start.step))

    def begun(self, steps: Sequence[tuple[int | None, int | None]]) -> Line:
        """Return the line of the newest branch that has one of `steps`, given as generation and number.

        A branch is recorded before its first save.  Until that is committed, the branch before it counts.
        """
        line = self
        while line.branches and not any(line.is_begun(made, number) for made, number in steps):
            line = line.before()
        return line


def _spans(branches: Sequence[Branch]) -> list[_Span]:
    """Return the parts of a line, the newest first."""
    spans: list[_Span] = []
    ends: list[float] = [*(branch.generation for branch in branches), float("inf")]
    at, upto = len(branches), float("inf")
    while at > 0:
        branch = branches[at - 1]
        spans.append(_Span(branch.generation, ends[at], branch.step, upto))
        upto = min(upto, branch.step)
        # The branch that the parent belongs to: the last one that began by then.
        at = next((i for i in range(at - 1, 0, -1) if branches[i - 1].generation <= branch.parent), 0)
    spans.append(_Span(_FIRST, ends[0], _FIRST, upto))
    return spans


logger = logging.getLogger("reknit")

MOST_NBYTES = 16 << 20
_TRIES = 50
"""How often a run puts its record where others do so at the same moment."""
_PAUSE_S = 0.05


_process = uuid.uuid4().hex
"""The name of this process, which a forked one does not keep."""


def _name_process() -> None:
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_name_process)


class Run(Struct, frozen=True):
    """A run, as its saves carry it: a function that opens the store of its folder, and its record there."""

    open: Callable[[], Storage]
    record: str

    @property
    def generation(self) -> int:
        """Its generation."""
        return _generation(self.record)

    def check(self) -> None:
        """Raise `FencedError` where a newer run has opened the folder."""
        with closing(self.open()) as root:
            check_record(root, self.record)


def check_record(root: Storage, record: str) -> bool:
    """Return whether a record is there.  Raises `FencedError` where a newer run has opened its folder."""
    records = _recorded(root)
    # A listing may lack a record that was put while another one was deleted.
    if record not in records:
        records += _recorded(root)
    others = [each for each in records if _identity(each) != _identity(record)]
    newest = max(others, key=_generation, default=None)
    if newest is None or _generation(newest) < _generation(record):
        return record in records
    raise FencedError(
        f"a newer run (generation {_generation(newest)}{_who(root, newest)}) has opened {root.url}; "
        f"this process belongs to generation {_generation(record)} and commits nothing there any more",
        path=f"{root.url}/{newest}",
        remedy="end this process if that run has taken its place; if not, give each run a folder of "
        "its own (an evaluation reads with `load`, which does not open the folder for writing)",
    )


def folder_above(url: str) -> str:
    """Return the place of the folder of a run, of whose steps one is at `url`."""
    place, mark, options = url.partition("?") if "://" in url else (url, "", "")
    scheme, separator, path = place.rpartition("://")
    above = path.rstrip("/").rpartition("/")[0]
    if not above and path.startswith("/"):
        above = "/"
    return f"{scheme}{separator}{above}{mark}{options}"


def open_run(
    root: Storage, at_least: int, line: Callable[[int], Line] | None = None, own: str | None = None
) -> str:
    """Open a folder of steps for writing, as the newest run there, and return the path of its record.

    Its generation is `at_least` so high, and higher than those of the runs before, since clocks may differ.
    From then on no save of an earlier run can put a marker there.  `line` returns the line of descent to
    record, by default that on record, from the generation.  A run that opens the folder again passes `own`,
    its record there.  Raises `StorageError`, `FencedError` if a newer run has opened it since, and
    `CommitError` if other runs open it all the time.
    """
    about = {"host": socket.gethostname(), "pid": os.getpid(), "opened": now(), "beats": True}
    about |= {"process": _process, "pids": _pids()}
    identity = uuid.uuid4().hex[:8] if own is None else _identity(own)
    for _ in range(_TRIES):
        if own is not None:
            check_record(root, own)
        older = _recorded(root)
        generation = max([at_least, *(_generation(each) + 1 for each in older)])
        descent = read_line(root)[1] if line is None else line(generation)
        mine = paths.run_path(generation, identity)
        data = json.dumps(about | {"branches": descent.branches}).encode()
        root.put(mine, data, if_absent=True)
        _share(root)
        # Either listing may lack one that was put while another one was deleted.
        files = {*_files(root), *_files(root)}
        others = [each for each in _records(files) if each != mine and each not in older]
        if not any(_generation(each) >= generation for each in others):
            with suppress(StorageError):  # its heartbeat tries that again
                root.put(paths.sign_path(mine, "beat"), b"", if_absent=False)
            _take_over(root, older, files, identity)
            return mine
        root.delete(mine)  # another run opens the folder at this moment
        time.sleep(dice.random() * _PAUSE_S)
    raise CommitError(
        f"other runs open {root.url} all the time, and none can have it",
        path=root.url,
        remedy="give each run a folder of its own",
    )


def read_line(root: Storage) -> tuple[int, Line]:
    """Return the generation of the run that has opened a folder last, and the line of descent of its steps.

    Without a record that is -1, and a line that has all steps.  So is the line of a record that this user
    cannot read, or that is damaged, with a warning.
    """
    for _ in range(_TRIES):
        if (newest := newest_record(root)) is None:
            return -1, Line()
        try:
            data = root.get(newest, limit=MOST_NBYTES)
            branches = [Branch(*map(int, branch)) for branch in json.loads(data).get("branches", [])]
        except StorageNotFoundError:  # a newer run has just replaced it
            continue
        except (StoragePermissionError, FormatError, ValueError, TypeError, AttributeError) as error:
            logger.warning("the branches of the run at %s/%s cannot be read: %s", root.url, newest, error)
            return _generation(newest), Line()
        return _generation(newest), Line(branches)
    return -1, Line()


def newest_line(roots: Iterable[Storage]) -> tuple[int, Line]:
    """Return the generation of the run that has opened any of several folders last, and its line."""
    found = [(-1, Line())]
    for root in roots:
        with suppress(StorageError):  # the reason is logged where it is opened
            found.append(read_line(root))
    return max(found, key=lambda each: each[0])


def newest_record(root: Storage) -> str | None:
    """Return the record of the run that has opened a folder last, None if none has."""
    return max(_recorded(root), key=_generation, default=None)


def newest_if_ended(root: Storage) -> tuple[str | None, bool]:
    """Return the record of the run that has opened a folder last, and whether its end is marked."""
    files = _files(root)
    newest = max(_records(files), key=_generation, default=None)
    return newest, newest is not None and paths.sign_path(newest, "end") in files


def _recorded(root: Storage) -> list[str]:
    """Return the records that are there."""
    return _records(_files(root))


def _records(files: Iterable[str]) -> list[str]:
    return [path for path in files if paths.run_generation(path) is not None]


def _files(root: Storage) -> list[str]:
    """Return the records that are there, and the files beside them.

    A folder that has had a record has one at each moment.  A listing without any is repeated, since a run
    may have replaced its record meanwhile.
    """
    for _ in range(2):
        files = [each.path for each in root.list(paths.RUN_FOLDER)]
        if _records(files):
            break
    return files


def _take_over(root: Storage, older: Sequence[str], files: Collection[str], identity: str) -> None:
    """Delete older records, with the signs of their runs and of all runs that have no record any more.

    A run of an earlier version leaves signs behind, and one whose record is deleted while it beats.
    """
    for each in older:
        if _identity(each) != identity:
            _say_taken(root, each, has_ended=paths.sign_path(each, "end") in files)
    stay = {_name(each) for each in _records(files) if each not in older}
    signs = [path for path in files if re.fullmatch(paths.RUN_SIGN, path) and _name(path) not in stay]
    for path in (*older, *signs):
        with suppress(StorageError):  # its generation is lower, and says nothing any more
            root.delete(path)


def _generation(record: str) -> int:
    generation = paths.run_generation(record)
    assert generation is not None
    return generation


def _name(path: str) -> str:
    """Return the part of a path that is the same in a record and in the signs of its run."""
    return path.split(".", 2)[2]


def _identity(record: str) -> str:
    """Return the random digits of a record, which stay those of its run."""
    return record.rpartition(".")[2]


def _share(root: Storage) -> None:
    """Let who may write to a folder of this host open it too: the record's folder gets its permissions."""
    if "://" not in root.url:
        with suppress(OSError):
            os.chmod(os.path.join(root.url, paths.RUN_FOLDER), os.stat(root.url).st_mode & 0o7777)


def _pids() -> str | None:
    """Return a key of the processes that see each other by their numbers: boot and namespace.

    Containers may share the name of their host, and each have a process 1.  None if the key is not known.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


class Owner(Struct, frozen=True):
    """The process that opened a run, as its record has it.

    `beats` is whether the process gives signs of life, which an earlier version never did.  `process` has
    random digits of the process, and `pids` names the namespace of `pid`.
    """

    host: str
    pid: int
    opened: float
    beats: bool = False
    process: str | None = None
    pids: str | None = None

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.opened, timezone.utc)
        return f"process {self.pid} of {self.host}, at {at:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def is_this(self) -> bool:
        """Whether it is this process, which may begin several runs one after another."""
        return self.process == _process

    @property
    def is_gone(self) -> bool:
        """Whether this host shows that the process is dead."""
        if self.pids is None or self.pids != _pids() or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # of another user, or no number of a process
            return False
        return False


def owner_of(root: Storage, record: str) -> Owner | None:
    """Return the process that opened a run, None if its record cannot be read."""
    try:
        about = json.loads(root.get(record, limit=MOST_NBYTES))
        found = Owner(
            str(about["host"])[:64],
            int(about["pid"]),
            float(about["opened"]),
            about.get("beats") is not None,
            about.get("process"),
            about.get("pids"),
        )
        str(found)  # a date may be out of range
    except (StorageError, FormatError, OSError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):  # nobody of us has put it
        return None
    return found


def _who(root: Storage, record: str) -> str:
    """Return the process that opened a run, for messages."""
    owner = owner_of(root, record)
    return "" if owner is None else f", {owner}"


def _say_taken(root: Storage, record: str, *, has_ended: bool) -> None:
    """Log that this run takes a folder from another; a warning unless that one has ended or is dead."""
    owner = owner_of(root, record)
    if owner is None or owner.is_this:
        return
    logger.log(
        logging.INFO if has_ended or owner.is_gone else logging.WARNING,
        "this run takes %s over from the run that opened it in %s; if that still trains, its saves there "
        "fail from now on (FencedError)",
        root.url,
        owner,
    )
