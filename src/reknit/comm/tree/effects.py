"""The input of a rank to a round, and the effects that its driver carries out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from reknit.comm.group import Merge
    from reknit.comm.rank_messages import Outcome, Report
    from reknit.errors import ReknitError


class Call(NamedTuple):
    """The input of a rank to a round.

    `subject` says what the round is about, to tell ranks apart that are in rounds of one name about different
    things.  `merge` makes one request of several, the rank's own first and then that of each child's subtree,
    so that rank 0 gets a single one; it must be associative, and is not called for a request alone.
    A round that `opens` is the first of a call that all ranks have to make: who waits there for long says so.
    """

    name: str
    request: bytes
    timeout_s: float
    subject: str = ""
    merge: Merge | None = None
    opens: bool = False


class SendReport(NamedTuple):
    """To do: send a report to the rank above."""

    report: Report


class SendOutcome(NamedTuple):
    """To do: tell a child the end of a round, as the answer to its report of that round."""

    child: int
    outcome: Outcome


class Refuse(NamedTuple):
    """To do: answer the report that just arrived, if its sender waits: say why it changed nothing.

    Where a message may arrive twice there is nothing to do, since the child's first report was taken.
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


class Tell(NamedTuple):
    """To do: tell the parent or a child that the group is broken (its `RoundMachine.break_off`)."""

    rank: int
    error: ReknitError


Effect: TypeAlias = SendReport | SendOutcome | Refuse | Decide | RoundDone | Warn | Tell
