"""The errors of a round: ranks in another round, missing ranks, lost ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import (
    CommError,
    DeadlineError,
    GroupClosedError,
    ProtocolError,
    ReknitError,
    UsageError,
    from_wire,
)
from reknit.types.entry import REMEDY
from reknit.types.small import spelled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reknit.comm.rank_messages import Heading, Hello, News

GRACE_S = 2.0
"""Seconds past a rank's own deadline that an error may take up the tree, and as many down again."""

SETTLE_S = 0.5
"""Seconds that a round which must fail still waits for other ranks, so that its error names them all."""

NOTICE_S = 5.0
"""Seconds after which a rank that waits for other ranks to make the same call logs that, once."""

FOREVER_S = 1e8
"""The longest wait that is passed to a lock or a call; more overflows their clocks."""

LOOK_S = 1.0
"""How often a rank that waits for another looks whether its process is still there."""

_MOST_PLACES = 8

_ORDER = "every rank must make the same calls in the same order"

ALL_CALL = (
    "every rank has to make this call with its own part, not rank 0 alone as with torch.save: if it is "
    "inside `if rank == 0`, move it out; if not, check that all ranks were started, and look at their logs"
)

_LOOK_FOR_A_KILL = (
    "look at the end of its log, and for a kill by the scheduler or by the out-of-memory killer"
)

_LOGS = "look at the logs of the ranks named here: they stopped, fail elsewhere, or are slower than this"


def copied(error: ReknitError) -> ReknitError:
    """Return a copy of an error, since raising it signs it and adds a traceback."""
    return from_wire(error.to_wire())


def failed_round(
    heading: Heading, places: Mapping[str, Iterable[int]], missing: Iterable[int], timeout_s: float
) -> CommError:
    """Return the error of a round that some ranks did not enter, or entered at another place.

    `places` maps the name and subject that ranks gave the round to those ranks.
    """
    absent = list(missing)
    if len(places) == 1:
        alone = [list(ranks) for ranks in places.values()] == [[0]]
        return DeadlineError(
            f"{spelled(absent)} did not come to {heading.label} within {timeout_s:g} s",
            remedy=ALL_CALL if alone else _LOGS,
        )
    first = sorted((sorted(ranks), place) for place, ranks in places.items())
    where = "; ".join(f"{spelled(ranks)} in {place}" for ranks, place in first[:_MOST_PLACES])
    more = f"; and {len(first) - _MOST_PLACES} places more" if len(first) > _MOST_PLACES else ""
    also = f"; {spelled(absent)} did not come" if absent else ""
    return ProtocolError(
        f"ranks are in different places in round {heading.number}: {where}{more}{also}", remedy=_ORDER
    )


def awaited(heading: Heading, ranks: Sequence[int], absent: Mapping[int, int]) -> str:
    """Return the notice that ranks wait for other ranks in a round that opens a call of all ranks.

    `absent` maps each rank that did not report to the number of ranks below it, any of which may be absent.
    """
    have = "has" if len(ranks) == 1 else "have"
    below = sum(absent.values())
    also = f" or some of the {below} ranks below, whose logs then say which," if below else ""
    for_whom = f"{spelled(absent)}{also} in {heading.place}"
    return f"{spelled(ranks)} {have} waited {NOTICE_S:g} s for {for_whom}: {ALL_CALL}"


def no_answer(heading: Heading, rank: int, timeout_s: float) -> DeadlineError:
    """Return the error of a round that this rank reported, and whose outcome did not come in time."""
    return DeadlineError(
        f"{spelled([rank])} did not answer {heading.label} within {timeout_s:g} s", remedy=_LOGS
    )


def decide_failed(heading: Heading, error: BaseException) -> CommError:
    """Return the error for the other ranks if `decide` raised, or gave answers that do not fit, on rank 0."""
    return CommError(f"rank 0 failed to decide {heading.label}: {type(error).__name__}: {error}")


def wrong_answer_count(heading: Heading, num_answers: int, size: int) -> ProtocolError:
    """Return the error of a round in which `decide` gave too few or too many answers."""
    return ProtocolError(f"{num_answers} answers were decided for {size} ranks in {heading.place}")


def merge_failed(heading: Heading, rank: int, error: Exception) -> CommError:
    """Return the error for all ranks if the requests of some ranks could not be merged."""
    return CommError(f"{spelled([rank])} failed to merge {heading.label}: {type(error).__name__}: {error}")


def skipped_round(heading: Heading, rank: int, theirs: Heading, waiting: int) -> ProtocolError:
    """Return the error of a round that a rank has left behind without taking part."""
    return ProtocolError(
        f"{spelled([rank])} is in {theirs.label} already, {spelled([waiting])} in {heading.label}",
        remedy=_ORDER,
    )


def late_message(heading: Heading, rank: int) -> ProtocolError:
    """Return the refusal of a message that repeats, or comes after the end of, its round."""
    return ProtocolError(f"{heading.label} is over, or {spelled([rank])} took part in it before")


def gave_up(heading: Heading, rank: int) -> CommError:
    """Return the error of a round in which a rank stopped waiting for its answer."""
    return CommError(
        f"{spelled([rank])} left {heading.label} before it ended: interrupted, dead, or out of time"
    )


def wrong_job(rank: int, message: Hello | Heading | News, here: Hello) -> ProtocolError | None:
    """Return the refusal of a message of another job, or of another run of it; None for one of ours."""
    if message.job != here.job:
        return ProtocolError(
            f"{spelled([rank])} belongs to job {message.job!r}, {spelled([here.rank])} to {here.job!r}",
            remedy="start every rank with the same job",
        )
    if message.generation == here.generation:
        return None
    age = "an older" if message.generation < here.generation else "a newer"
    return ProtocolError(
        f"{spelled([rank])} belongs to {age} run of job {here.job!r} than {spelled([here.rank])}: "
        f"generation {message.generation}, and this rank's is {here.generation}",
        remedy="let every process of the older run end before a newer one begins",
    )


def disconnected(rank: int, detail: str = "") -> CommError:
    """Return the error of a group in which the process of a rank is dead or cannot be reached any more."""
    return CommError(
        f"{spelled([rank])} is gone: its connection broke" + (f" ({detail})" if detail else ""),
        remedy=_LOOK_FOR_A_KILL,
    )


def process_ended(rank: int) -> CommError:
    """Return the error of a group in which the process of a rank of this host ended before it connected."""
    return CommError(
        f"{spelled([rank])} is gone: its process ended before it connected", remedy=_LOOK_FOR_A_KILL
    )


def not_connected(ranks: Sequence[int], above: int, timeout_s: float) -> DeadlineError:
    """Return the error of a group in which ranks did not connect to the one above them."""
    return DeadlineError(
        f"{spelled(ranks)} did not connect to {spelled([above])} within {timeout_s:g} s",
        remedy=_LOOK_FOR_A_KILL,
    )


def unreachable(rank: int, address: str, timeout_s: float, detail: str) -> DeadlineError:
    """Return the error of a rank that cannot join, since the one above it does not answer."""
    return DeadlineError(
        f"{spelled([rank])} at {address} could not be reached within {timeout_s:g} s: {detail}",
        remedy="look at its log, or set CommOptions.bind there to an address that this host can reach",
    )


def wrong_token(rank: int, address: str) -> CommError:
    """Return the error of a rank that came to the one above it with the token of another port."""
    return CommError(
        f"{spelled([rank])} at {address} does not accept the token that was published with its address",
        remedy="give each rank the complete address of its parent rank in this run",
    )


def closed(rank: int) -> GroupClosedError:
    """Return the error of a group that a rank has left."""
    return GroupClosedError(f"{spelled([rank])} closed the group")


def duplicate_rank(rank: int) -> ProtocolError:
    """Return the refusal of a process that comes as a rank which another process is."""
    return ProtocolError(
        f"another process is rank {rank} already, or that rank does not report here",
        remedy="give each process a rank of its own, and each run of a job another name",
    )


def wrong_topology(rank: int, here: int) -> ProtocolError:
    """Return the refusal of a rank that takes the group for another one."""
    return ProtocolError(
        f"rank {rank} joins with a tree of another size, fan-out or placement on hosts than rank {here}",
        remedy="start every rank with the same size and CommOptions.fan_out",
    )


def forked(rank: int) -> UsageError:
    """Return the refusal of a process that was forked from a rank, and has its group."""
    return UsageError(
        f"this process was forked from rank {rank}, and is not a rank of its group",
        remedy="save and load in the rank itself; a process that is to do so alone, to a path of its own, "
        "passes group=reknit.alone()",
    )


def concurrent_rounds(rank: int, *, inside: bool = False) -> ProtocolError:
    """Return the refusal of a second round of one rank while its first is under way.

    It is `inside` if the same thread holds both, as a signal handler in the code that it interrupts.
    """
    if inside:
        return ProtocolError(
            f"a round of {spelled([rank])} was begun by the same thread that is inside another one of the "
            "group, as a signal handler does that saves",
            remedy=REMEDY,
        )
    return ProtocolError(
        f"two threads of {spelled([rank])} hold a round of one group at the same time",
        remedy="give each thread a group of its own",
    )
