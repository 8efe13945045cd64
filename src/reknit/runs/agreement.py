"""All ranks save at the same step, also where the time or a notice to one of them decides."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from reknit.comm import group as comm
from reknit.engine.background.lanes import side_group
from reknit.errors import ReknitError
from reknit.events.phase import monotonic
from reknit.options import CommOptions
from reknit.policies.policy import Moment
from reknit.policies.save_policies import OnPreemption
from reknit.runs.preemption import EarlyRounds, Notice, Notices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.policies.policy import Facts, Policy

logger = logging.getLogger("reknit")

_ROUND_EVERY_S = 2.0
_MOST_STEPS = 100
"""Between two rounds: steps may become slower at once, and the time that policies wait for is then late."""


def ask_root(
    group: Group, name: str, timeout_s: float, question: Callable[[], Any], subject: str = ""
) -> Any:
    """Return the answer of rank 0, made of values of JSON; its errors are raised on all ranks."""
    with comm.turn(group, name, timeout_s, merge=b"".join, subject=subject, opens=True) as turn:
        answer = b"" if turn.gather(b"") is None else json.dumps(question()).encode()
        return json.loads(turn.give_all(answer, bytes))


class Agreement:
    """Decides for every step whether all ranks save.

    If a policy depends on the step alone, each rank decides by itself.  Otherwise rank 0 decides in a round
    between the ranks, about every two seconds.  Each round also sets the step of the next round.  Between two
    rounds, the ranks save only if that follows from the step alone.  The pace of training may change, so a
    notice brings a round of its own: within two seconds and the step that each rank is in (`EarlyRounds`).

    With `follows`, saves go on in the background, and there are rounds until the last one is committed.  If
    it has failed, the next step is saved in its place.
    """

    def __init__(
        self,
        group: Group,
        policy: Policy,
        timeout_s: float,
        *,
        follows: bool = False,
        options: CommOptions | None = None,
    ) -> None:
        self._group, self._policy, self._timeout_s = group, policy, timeout_s
        self._options = options or CommOptions()
        self._early: EarlyRounds | None = None
        self._is_sparse = False
        """Whether a round has left out the next step."""
        self._follows, self._open = follows, False
        notices = [leaf for leaf in policy.leaves() if isinstance(leaf, OnPreemption)]
        self._notices, self._watches = Notices(notices), bool(notices)
        self._next = self._asked = 0
        self._last: tuple[int, float] | None = None
        self._notice: Notice | None = None

    @property
    def preempted(self) -> str | None:
        """The reason why a rank will end soon, or None; the same on all ranks."""
        return None if self._notice is None else self._notice.what

    def saved(self) -> None:
        """Note that a save has begun."""
        self._open = self._follows

    def due(self, step: int, saved: int | None, facts: Callable[[], Facts]) -> bool:
        """Return whether to save after a step; rank 0 calls `facts`, and adds the notices of all ranks."""
        if step < self._asked:  # an earlier step was loaded, so the step of the next round is out of date
            self._next, self._last = 0, None
        self._asked = step
        early = self._early is not None and self._early.begins()
        answer = self._policy.due(Moment(step=step, saved=saved))
        # A notice has to reach all ranks also where each step is saved in any case.
        planned = step >= self._next and (answer is None or self._watches or self._open)
        if not (early or planned):
            return bool(answer)
        mine = _encoded(self._notices.seen() or self._notice)
        about = f"step {step}"
        with comm.turn(
            self._group, "steps", self._timeout_s, merge=_soonest, subject=about, opens=True
        ) as turn:
            notices, decided = turn.gather(mine), b""
            if notices is not None:
                decided = json.dumps(self._decided(_soonest(notices), step, saved, facts())).encode()
            due, notice, self._next, self._open = json.loads(turn.give_all(decided, bytes))
        self._notice = _decoded(notice)
        if self._watches and self._next > step + 1 and not self._is_sparse:
            self._is_sparse = True
            self._form_early()
        return bool(due)

    def _decided(self, notice: bytes, step: int, saved: int | None, facts: Facts) -> list[Any]:
        """Return for all ranks whether to save, the notice, the next round, and whether a save is open."""
        what, left_s = json.loads(notice) if notice else (None, None)
        known = replace(facts, preempted=what is not None, left_s=left_s)
        due = known.failed or bool(self._policy.due(Moment(step=step, saved=saved, facts=known)))
        if not (due or known.in_time or self.preempted):
            logger.warning(
                "step %d is not saved on %s: %.1f s are left, and the last save took %.1f s",
                *(step, what, left_s, known.write_s),
            )
        return [due, notice.decode(), self._next_round(step), known.busy and self._open]

    def _form_early(self) -> None:
        """Connect the threads that look for notices between two rounds; all ranks call this."""
        try:
            side = side_group(self._group, "notices", self._options, self._timeout_s)
            self._early = EarlyRounds(side, lambda: self._notices.seen() is not None, self._timeout_s)
        except ReknitError as error:  # the planned rounds stay
            logger.warning("a notice may wait for %d steps: %s", _MOST_STEPS, error)

    def _next_round(self, step: int) -> int:
        """Return the step of the next round, in about two seconds at the pace of training."""
        if self._group.size == 1:
            return step + 1
        before, self._last = self._last, (step, monotonic())
        if before is None or step <= before[0]:
            return step + 1
        step_s = (self._last[1] - before[1]) / (step - before[0])
        return step + max(1, min(_MOST_STEPS, int(_ROUND_EVERY_S / max(step_s, 1e-9))))

    def close(self) -> None:
        """Stop watching for notices."""
        if self._early is not None:
            self._early.close()
        self._notices.close()


def _encoded(notice: Notice | None) -> bytes:
    """Return a notice as bytes, with the time left, since the clocks of ranks differ; no bytes for None."""
    if notice is None:
        return b""
    left_s = None if notice.ends_at is None else notice.ends_at - monotonic()
    return json.dumps([notice.what, left_s]).encode()


def _decoded(notice: str) -> Notice | None:
    if not notice:
        return None
    what, left_s = json.loads(notice)
    return Notice(what, None if left_s is None else monotonic() + left_s)


def _soonest(notices: Sequence[bytes]) -> bytes:
    """Return the notice of the rank that ends first."""

    def left_s(notice: bytes) -> float:
        left = json.loads(notice)[1]
        return inf if left is None else float(left)

    return min(filter(None, notices), key=left_s, default=b"")
