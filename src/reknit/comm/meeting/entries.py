"""The entries of the rendezvous store: ranks, the table of hosts, and addresses."""

from __future__ import annotations

from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from reknit.comm.meeting import identity
from reknit.comm.round_errors import LOOK_S, process_ended
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, from_wire, shortage
from reknit.monitor.phase import Deadline
from reknit.types.decoding import decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.comm.meeting.rendezvous import Store
    from reknit.comm.topology import Topology

_LEFT = b"left "
"""The beginning of the message of a rank that leaves, and of no address."""


class Shape(NamedTuple):
    """The ranks of a group: the name of this run, their places in the tree, and the generation.

    `together`: all ranks are on one host, belong to one user, and see the same files, so that they can meet
    at a socket in a folder.  `processes`: the processes of the ranks below this rank on its host, by the
    names of `identity.process`.
    """

    run: str
    topology: Topology
    generation: int
    together: bool = False
    processes: Mapping[int, str] = MappingProxyType({})


class RankEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The entry of a rank for rank 0: its host, the expected size, the reach of its sockets, its process."""

    host: str
    size: int
    reach: str = ""
    process: str = ""


class HostTable(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The entry of rank 0 for all: the number of each rank's host, as packed 32-bit integers; or an error."""

    size: int = 0
    fan_out: int = 0
    generation: int = 0
    hosts: bytes = b""
    error: dict[str, Any] | None = None
    together: bool = False


_Message = TypeVar("_Message", RankEntry, HostTable)


def base(job: str) -> str:
    """Return the beginning of the keys of a job, before a slash: no other job has keys below it."""
    return f"reknit/{quote(job, safe='')}"


def host_key(job: str, run: str, rank: int) -> str:
    """Return the key of a rank's `RankEntry`."""
    return f"{base(job)}/{run}/host/{rank}"


def publish_address(store: Store, job: str, run: str, rank: int, address: str) -> None:
    """Publish the address of this rank for the ranks below."""
    store.set(_address_key(job, run, rank), address.encode())


def publish_leaving(store: Store, job: str, run: str, rank: int, error: BaseException) -> None:
    """Publish the error with which this rank leaves the rendezvous, in the place of its address."""
    with suppress(CommError):  # of a store that is gone; they find out by themselves
        store.set(_address_key(job, run, rank), _LEFT + msgspec.msgpack.encode(error_to_wire(error, rank)))


def address_of(store: Store, job: str, shape: Shape, rank: int, timeout_s: float) -> str:
    """Return the address of a rank, once it listens.

    Raises the error with which it left, if it did, `CommError` when its process has ended, `DeadlineError`.
    """
    deadline = Deadline(timeout_s)
    while True:
        try:
            value = store.get(_address_key(job, shape.run, rank), min(LOOK_S, deadline.remaining()))
            break
        except DeadlineError:
            if identity.has_ended(decoded(store.get(host_key(job, shape.run, rank), 0), RankEntry).process):
                raise process_ended(rank) from None
            if deadline.passed():
                raise
    if not value.startswith(_LEFT):
        return value.decode(errors="replace")
    try:
        raise from_wire(decoder(dict[str, Any])(value[len(_LEFT) :]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise garbled() from error


def _address_key(job: str, run: str, rank: int) -> str:
    return f"{base(job)}/{run}/address/{rank}"


def error_to_wire(error: BaseException, rank: int = 0) -> dict[str, Any]:
    """Return the form in which the other ranks receive an error."""
    known = error if isinstance(error, ReknitError) else shortage(error)
    left = f"rank {rank} left the rendezvous: {type(error).__name__}: {error}"
    return (known or CommError(left)).to_wire()


def decoded(value: bytes, kind: type[_Message]) -> _Message:
    """Return the entry in `value`.  Raises `ProtocolError`."""
    try:
        return decoder(kind)(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise garbled() from error


def garbled() -> ProtocolError:
    """Return the error of an entry that cannot be read."""
    return ProtocolError(
        "the store has a wrong value where ranks publish their addresses",
        remedy="run the same version of reknit on all ranks",
    )
