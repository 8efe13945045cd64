"""What went wrong in a round, as errors: who is elsewhere, who did not come, who is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import CommError, DeadlineError, GroupClosedError, ProtocolError, ReknitError, from_wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GRACE_S = 2.0
"""Seconds past a rank's own deadline that bad news may take up the tree, and as many down again."""

SETTLE_S = 0.5
"""Seconds that a round which must fail still waits for other ranks, so that its error names them all."""

FOREVER_S = 1e8
"""The longest wait that is passed to a lock or a call; more overflows their clocks."""

_LOGS = "look at the logs of the ranks named here: they stopped, fail elsewhere, or are slower than this"


def copied(error: ReknitError) -> ReknitError:
    """Return an equal error of its own, since whoever raises one signs it and adds a traceback."""
    return from_wire(error.to_wire())


def spelled(ranks: Iterable[int], limit: int = 16) -> str:
    """Return the ranks as text, with neighbours joined: ``rank 3`` or ``ranks 0-4, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans[:limit]]
    rest = sum(high - low + 1 for low, high in spans[limit:])
    noun = "rank" if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks"
    return f"{noun} {', '.join(parts)}" + (f" and {rest} more" if rest else "")


def failed_round(
    number: int, places: Mapping[str, Iterable[int]], missing: Iterable[int], timeout_s: float
) -> CommError:
    """Return the error of a round that some ranks entered by another name, or did not enter in time.

    `places` maps the name that ranks gave the round to those ranks.
    """
    absent = list(missing)
    if len(places) == 1:
        name = next(iter(places))
        return DeadlineError(
            f"{spelled(absent)} did not come to round {number} ({name!r}) within {timeout_s:g} s",
            remedy=_LOGS,
        )
    where = "; ".join(f"{spelled(ranks)} in {name!r}" for name, ranks in places.items())
    also = f"; {spelled(absent)} did not come" if absent else ""
    return ProtocolError(
        f"ranks are in different places in round {number}: {where}{also}",
        remedy="every rank must make the same calls in the same order",
    )


def undecided(number: int, name: str, timeout_s: float) -> DeadlineError:
    """Return the error of a round whose requests were all there, and whose answers did not come in time."""
    return DeadlineError(
        f"rank 0 did not answer round {number} ({name!r}) within {timeout_s:g} s", remedy=_LOGS
    )


def misdecided(number: int, name: str, error: BaseException) -> CommError:
    """Return what the other ranks hear when `decide` raised, or gave answers that do not fit, on rank 0."""
    return CommError(f"rank 0 failed to decide round {number} ({name!r}): {type(error).__name__}: {error}")


def ahead(
    number: int, name: str, rank: int, their_number: int, their_name: str, waiting: int
) -> ProtocolError:
    """Return the error of a round that a rank has left behind without taking part."""
    return ProtocolError(
        f"{spelled([rank])} is in round {their_number} ({their_name!r}) already, "
        f"{spelled([waiting])} in round {number} ({name!r})",
        remedy="every rank must make the same calls in the same order",
    )


def over(number: int, name: str, rank: int) -> ProtocolError:
    """Return the refusal of a message that repeats, or comes after the end of, its round."""
    return ProtocolError(f"round {number} ({name!r}) is over, or {spelled([rank])} took part in it before")


def left(number: int, name: str, rank: int) -> CommError:
    """Return the error of a round in which a rank stopped waiting for its answer."""
    return CommError(
        f"{spelled([rank])} left round {number} ({name!r}) before it ended: interrupted, dead, or out of time"
    )


def gone(rank: int, detail: str = "") -> CommError:
    """Return the error of a group in which the process of a rank is dead or cannot be reached any more."""
    return CommError(
        f"{spelled([rank])} is gone: its connection broke" + (f" ({detail})" if detail else ""),
        remedy="look at the end of its log, and for a kill by the scheduler or by the out-of-memory killer",
    )


def unreachable(rank: int, address: str, timeout_s: float, detail: str) -> DeadlineError:
    """Return the error of a rank that cannot join, since the one above it does not answer."""
    return DeadlineError(
        f"{spelled([rank])} at {address} could not be reached within {timeout_s:g} s: {detail}",
        remedy="look at its log, or set CommOptions.bind there to an address that we reach",
    )


def stranger(rank: int, address: str) -> CommError:
    """Return the error of a rank that came to the one above it with a token of another seat."""
    return CommError(
        f"{spelled([rank])} at {address} does not know the token that came with this address",
        remedy="give each rank the address of the rank above it in this run, and in full",
    )


def closed(rank: int) -> GroupClosedError:
    """Return the error of a group that a rank has left."""
    return GroupClosedError(f"{spelled([rank])} closed the group")


def crowded(rank: int) -> ProtocolError:
    """Return the refusal of a second round of one rank while its first is under way."""
    return ProtocolError(
        f"two threads of {spelled([rank])} hold a round of one group at the same time",
        remedy="give each thread a group of its own",
    )
