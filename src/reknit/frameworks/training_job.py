"""A job of a framework: its ranks, and the store through which they connect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from reknit.comm.meeting.rendezvous import Store


class TrainingJob(Struct, frozen=True):
    """The ranks that save and load together, of torch or of JAX.

    `rank` and `size` count inside the job or subgroup, `ranks` are the job-wide numbers of its ranks.
    `identity` is one object for the lifetime of a group, as a key for data that is kept per group.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    store: Store
    identity: Any
