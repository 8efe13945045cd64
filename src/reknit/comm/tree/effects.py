"""The effects of a round that the driver of its machine carries out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from reknit.comm.rank_messages import Outcome, Report
    from reknit.errors import ReknitError


class SendReport(NamedTuple):
    """To do: send a report to the rank above."""

    report: Report


class SendOutcome(NamedTuple):
    """To do: send a child the outcome of a round, as the answer to its report of that round."""

    child: int
    outcome: Outcome


class Refuse(NamedTuple):
    """To do: answer the report that just arrived, if its sender waits, with the reason for its refusal.

    If messages may arrive twice, there is nothing to do, since the child's first report was taken.
    """

    error: ReknitError


class Decide(NamedTuple):
    """To do, on rank 0: find the answers for all ranks, and call `RoundMachine.decided` with them."""

    number: int
    requests: list[bytes]


class RoundDone(NamedTuple):
    """To do: end this rank's round; `outcome` holds its own answer alone, or the error to raise."""

    number: int
    outcome: Outcome


class Warn(NamedTuple):
    """To do: log, as a warning, that other ranks have not made the call that this round opens."""

    text: str


class Notify(NamedTuple):
    """To do: send the parent or a child the error that broke the group (its `RoundMachine.break_off`)."""

    rank: int
    error: ReknitError


Effect: TypeAlias = SendReport | SendOutcome | Refuse | Decide | RoundDone | Warn | Notify
