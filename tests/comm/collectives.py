"""Gather, scatter, broadcast and agreement as rounds, for tests of the promises of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.comm.group import turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from reknit.errors import ReknitError


def gather(
    group: Group, name: str, payload: bytes, timeout_s: float, *, subject: str = ""
) -> list[bytes] | None:
    """Return every rank's payload on rank 0, and None elsewhere."""
    with turn(group, name, timeout_s, subject=subject) as its_turn:
        payloads = its_turn.gather(payload)
        its_turn.arrive()
    return payloads


def scatter(
    group: Group, name: str, payloads: Sequence[bytes] | None, timeout_s: float, *, subject: str = ""
) -> bytes:
    """Return this rank's part of the `payloads` that rank 0 gave, one for each rank."""
    with turn(group, name, timeout_s, merge=b"".join, subject=subject) as its_turn:
        requests = its_turn.gather(b"")
        return its_turn.give(None if requests is None else payloads, bytes)


def broadcast(
    group: Group, name: str, payload: bytes | None, timeout_s: float, *, subject: str = ""
) -> bytes:
    """Return the payload that rank 0 gave; it is not looked at on other ranks."""
    return scatter(group, name, [payload or b""] * group.size, timeout_s, subject=subject)


def agree(group: Group, name: str, error: ReknitError | None, timeout_s: float, *, subject: str = "") -> None:
    """Return on every rank when no rank brought an error; otherwise raise the same one on all."""
    with turn(group, name, timeout_s, merge=b"".join, subject=subject) as its_turn:
        if error is not None:
            raise error
        its_turn.arrive()
