"""Who is on which host?  The ranks of a job tell rank 0 in a store, and it tells them all what they are.

Stores keep what was put into them, and a job that was started again may find what a dead run of it left.  So
rank 0 names each run anew, and all else stands under that name.  A rank that reads the name of an old run
notices in one of two ways: what the ranks of that run are has been told already, which cannot be before this
rank has come; or the name changes while it waits.  Then it begins again.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from reknit.comm.topology import Topology
from reknit.comm.tree.round_errors import ALL_CALL, GRACE_S, spelled
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, UsageError, from_wire
from reknit.monitor.phase import Deadline, now
from reknit.options import host_name

if TYPE_CHECKING:
    from reknit.comm.meeting.rendezvous import Store
    from reknit.options import CommOptions

_SLICES_S = (0.25, 4.0)
"""The first and the longest wait for others before a look at whether the run has been replaced."""

_PAUSES_S = (0.02, 1.0)
_LONGEST_HOST = 1024

_LEFT = b"left "
"""What the word of a rank that leaves begins with, and no address."""

_STARTED = (
    "check that all ranks were started, with the same size, and meet under the same name in the same place"
)


class Shape(NamedTuple):
    """What the ranks of a group are: the name of this run, who is where, and which generation it is.

    `together`: whether all are on one host, of one user, and see the same files, so that they can meet at a
    socket in a folder.
    """

    run: str
    topology: Topology
    generation: int
    together: bool = False


class _Here(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a rank tells rank 0: where it is, what it takes the group for, and who reaches its sockets."""

    host: str
    size: int
    reach: str = ""


class _HostTable(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What rank 0 tells all: the number of each rank's host, as packed 32-bit integers; or an error."""

    size: int = 0
    fan_out: int = 0
    generation: int = 0
    hosts: bytes = b""
    error: dict[str, Any] | None = None
    together: bool = False


_Message = TypeVar("_Message", _Here, _HostTable)


def host() -> str:
    """Return what the ranks of this host have in common, and those of others do not.

    That is what REKNIT_HOST says; else the machine and its start, its name, and its network, so that two
    containers of one machine are two hosts unless they share a network.
    """
    if (name := host_name()) is not None:
        return name
    parts = [socket.gethostname()]
    with suppress(OSError):  # a system without these tells its hosts apart by name
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return " ".join(parts)


def reach() -> str:
    """Return what processes of one host have in common that reach each other's sockets in private folders.

    That is their user, and the files that they see, which differ between containers that share a network.
    """
    with suppress(OSError):
        return f"{os.geteuid()} {os.stat('/proc/self/ns/mnt').st_ino}"
    return ""


def base(job: str) -> str:
    """Return what the keys of a job begin with, before a slash: no other job has keys below it."""
    return f"reknit/{quote(job, safe='')}"


def gather_shape(
    store: Store, rank: int, size: int, *, job: str, options: CommOptions, timeout_s: float
) -> Shape:
    """Return what the group of `size` ranks that meet under the name `job` is, once all have come.

    Raises `DeadlineError`, on every rank that came, naming those that did not within `timeout_s`;
    `ProtocolError` when ranks take the group for different ones, `CommError` when the store fails.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {size}")
    place = _RankPlace(store, job, size, timeout_s)
    return place.form(options) if rank == 0 else place.attend(rank, options)


class _RankPlace:
    """The part of a store in which the ranks of a group meet."""

    def __init__(self, store: Store, job: str, size: int, timeout_s: float) -> None:
        self._store, self._job, self._size = store, job, size
        self._base = base(job)
        self._deadline = Deadline(timeout_s)

    # Rank 0.

    def form(self, options: CommOptions) -> Shape:
        """Begin a run, and return what it is once all ranks have come; tell them too, and what went wrong."""
        run, before = secrets.token_hex(16), self._last_generation()
        if (forget := getattr(self._store, "forget", None)) is not None:
            forget(f"{self._base}/")
        self._store.set(self._run_key, run.encode())
        try:
            numbers, together = self._numbers(run)
            if self._run() != run:
                raise self._replaced()
            generation = options.generation
            if generation is None:  # higher than that of the run before, though a clock was set back since
                generation = max(int(now() * 1000), before + 1)
            packed = zlib.compress(np.asarray(numbers, "<i4").tobytes())
            told = _HostTable(self._size, options.fan_out, generation, packed, together=together)
            self._store.set(self._shape_key(run), msgspec.msgpack.encode(told))
        except BaseException as error:  # Ctrl-C too: whatever it is, the ranks that came wait for word
            with suppress(CommError):  # of a store that is gone; they find out by themselves
                self._store.set(self._shape_key(run), msgspec.msgpack.encode(_HostTable(error=_wire(error))))
            raise
        return Shape(run, Topology(numbers, options.fan_out), generation, together)

    def _last_generation(self) -> int:
        """Return the generation of the run that the store still tells of, -1 where there is none."""
        with suppress(ProtocolError):  # of an earlier version, perhaps
            if (run := self._run()) is not None and (told := self._found(self._shape_key(run))) is not None:
                return _decoded(told, _HostTable).generation
        return -1

    def _numbers(self, run: str) -> tuple[list[int], bool]:
        """Return the number of each rank's host, in the order in which the hosts first appear.

        And whether all of them can meet at a socket in a folder.
        """
        keys = [self._host_key(run, rank) for rank in range(1, self._size)]
        here = [_decoded(value, _Here) for value in (self._here(), *self._gathered(keys, run))]
        wrong = [rank for rank, theirs in enumerate(here) if theirs.size != self._size]
        if wrong:
            raise ProtocolError(
                f"rank {wrong[0]} joins job {self._job!r} with size {here[wrong[0]].size}, rank 0 with size "
                f"{self._size}" + (f"; so do {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                remedy="start every rank with the same size",
            )
        numbers: dict[str, int] = {}
        hosts = [numbers.setdefault(theirs.host[:_LONGEST_HOST], len(numbers)) for theirs in here]
        reaches = {theirs.reach for theirs in here}
        return hosts, len(numbers) == len(reaches) == 1 and "" not in reaches

    def _gathered(self, keys: list[str], run: str) -> list[bytes]:
        """Return what stands under keys, all of them; raises `DeadlineError` that names the ranks missing."""
        if not keys:
            return []
        slice_s = _SLICES_S[0]
        while True:
            try:
                return self._get_many(keys, min(slice_s, self._deadline.remaining()))
            except DeadlineError as error:
                if self._run() != run:
                    raise self._replaced() from error
                if self._deadline.passed():
                    raise self._incomplete(keys) from error
            slice_s = min(_SLICES_S[1], slice_s * 2)

    def _get_many(self, keys: list[str], timeout_s: float) -> list[bytes]:
        many = getattr(self._store, "get_many", None)
        if many is not None:
            values: list[bytes] = many(keys, timeout_s)
            return values
        deadline = Deadline(timeout_s)
        return [self._store.get(key, deadline.remaining()) for key in keys]

    def _incomplete(self, keys: list[str]) -> DeadlineError:
        looking, missing, seen = Deadline(GRACE_S), [], 0
        for rank, key in enumerate(keys, start=1):
            if looking.passed():
                break
            seen += 1
            if self._found(key) is None:
                missing.append(rank)
        rest = f" (of ranks 0-{seen}; there was no time to look for the others)" if seen < len(keys) else ""
        remedy = ALL_CALL if len(missing) == self._size - 1 else _STARTED
        return DeadlineError(
            f"{spelled(missing) if missing else 'some ranks'} did not come to the rendezvous of job "
            f"{self._job!r} within {self._deadline.seconds:g} s{rest}",
            remedy=remedy,
        )

    def _replaced(self) -> CommError:
        return CommError(
            f"another process has taken the place of rank 0 in the rendezvous of job {self._job!r}",
            remedy="let a job end before it is started again, and give jobs that run at once different names",
        )

    # All others.

    def attend(self, rank: int, options: CommOptions) -> Shape:
        """Tell rank 0 that this rank is here, and return what it says; begin again when it was an old run."""
        old: str | None = None
        what_it_was = ""
        while True:
            run = self._newer_run(old, what_it_was)
            if (stale := self._found(self._shape_key(run))) is not None:
                old, what_it_was = run, self._told_of(stale, rank)
                continue
            self._store.set(self._host_key(run, rank), self._here())
            value = self._answer(run)
            if value is not None and self._run() == run:
                return self._understood(_decoded(value, _HostTable), run, rank, options)

    def _told_of(self, stale: bytes, rank: int) -> str:
        """Say what kept a rank that came late out of a run, as far as that is known."""
        try:
            told = _decoded(stale, _HostTable)
        except ProtocolError:
            return ""  # of an earlier version, perhaps; it is over in any case
        if told.error is not None:
            return f", which ended with: {from_wire(told.error).message}"
        if told.size != self._size:
            return f"; that has {told.size} ranks, and this one comes as rank {rank} of {self._size}"
        return ""

    def _newer_run(self, old: str | None, what_it_was: str) -> str:
        """Return the name of a run that is not `old`, once rank 0 begins one."""
        pause_s = _PAUSES_S[0]
        while True:
            try:
                run = self._store.get(self._run_key, self._deadline.remaining()).decode(errors="replace")
            except DeadlineError as error:
                raise self._late("rank 0 did not come to") from error
            if run != old:
                return run
            if self._deadline.passed():
                left = f": there is only what an earlier run left{what_it_was}"
                raise self._late("rank 0 did not come to", left)
            time.sleep(min(pause_s, self._deadline.remaining()))
            pause_s = min(_PAUSES_S[1], pause_s * 2)

    def _answer(self, run: str) -> bytes | None:
        """Return what rank 0 says about a run, None when it is not the current one any more."""
        patience = Deadline(self._deadline.remaining() + GRACE_S)  # for rank 0 to say who is missing
        slice_s = _SLICES_S[0]
        while True:
            with suppress(DeadlineError):
                return self._store.get(self._shape_key(run), min(slice_s, patience.remaining()))
            if self._run() != run:
                return None
            if patience.passed():
                raise self._late("rank 0 did not tell who has come to")
            slice_s = min(_SLICES_S[1], slice_s * 2)

    def _understood(self, told: _HostTable, run: str, rank: int, options: CommOptions) -> Shape:
        if told.error is not None:
            raise from_wire(told.error)
        if told.size != self._size:
            raise ProtocolError(
                f"rank {rank} joins job {self._job!r} with size {self._size}, rank 0 with size {told.size}",
                remedy="start every rank with the same size",
            )
        if options.generation not in (None, told.generation):
            raise ProtocolError(
                f"rank {rank} is of generation {options.generation}, rank 0 of {told.generation}",
                remedy="give every rank of a run the same CommOptions.generation",
            )
        unpacker = zlib.decompressobj()
        try:
            hosts = np.frombuffer(unpacker.decompress(told.hosts, 4 * told.size + 1), "<i4")
        except (zlib.error, ValueError) as error:
            raise _garbled() from error
        if len(hosts) != told.size or told.fan_out < 1:
            raise _garbled()
        return Shape(run, Topology(hosts.astype(np.int64), told.fan_out), told.generation, told.together)

    def _here(self) -> bytes:
        return msgspec.msgpack.encode(_Here(host(), self._size, reach()))

    def _late(self, what: str, why: str = "") -> DeadlineError:
        return DeadlineError(
            f"{what} the rendezvous of job {self._job!r} within {self._deadline.seconds:g} s{why}",
            remedy=_STARTED,
        )

    # What stands where.

    @property
    def _run_key(self) -> str:
        return f"{self._base}/run"

    def _shape_key(self, run: str) -> str:
        return f"{self._base}/{run}/shape"

    def _host_key(self, run: str, rank: int) -> str:
        return f"{self._base}/{run}/host/{rank}"

    def _run(self) -> str | None:
        """Return the name of the run that the store holds now."""
        value = self._found(self._run_key)
        return None if value is None else value.decode(errors="replace")

    def _found(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, 0)
        except DeadlineError:
            return None


def left(error: BaseException, rank: int) -> bytes:
    """Return what a rank that leaves tells the ranks below it in the place of its address."""
    return _LEFT + msgspec.msgpack.encode(_wire(error, rank))


def address_in(value: bytes) -> str:
    """Return the address that a rank has told; raises the error with which it left, if it did."""
    if value.startswith(_LEFT):
        try:
            raise from_wire(msgspec.msgpack.decode(value[len(_LEFT) :], type=dict[str, Any]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _garbled() from error
    return value.decode(errors="replace")


def _wire(error: BaseException, rank: int = 0) -> dict[str, Any]:
    """Return an error as the other ranks hear of it."""
    if isinstance(error, ReknitError):
        return error.to_wire()
    return CommError(f"rank {rank} left the rendezvous: {type(error).__name__}: {error}").to_wire()


def _decoded(value: bytes, kind: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _garbled() from error


def _garbled() -> ProtocolError:
    return ProtocolError(
        "the store holds something else where ranks tell each other who they are",
        remedy="run the same version of reknit on all ranks",
    )
