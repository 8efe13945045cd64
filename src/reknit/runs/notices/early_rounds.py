"""Before the next planned round: does a notice to any rank need a round now, and at which call of all ranks?

Ranks that train in step must take part in the same rounds of the run, or each would wait for another.  So a
rank that has a notice cannot begin a round alone.  A thread of each rank looks at its notices every two
seconds, and the threads hold rounds of a group of their own, in which training takes no part:

1. *look*: has any rank a notice?  Training goes on.
2. *meet*, only after a notice: each rank sends the number of calls that it has begun.  Its next call waits
   for the answer, which is the highest of these numbers.  The call after that is the round of all ranks.

No rank has begun that call, because each would have had to wait before.  The wait ends, since it depends on
the threads alone: a rank that is inside a step, a collective or a planned round answers all the same.  If the
round *meet* fails before rank 0 has all numbers, no rank has an answer, and all go on with the planned
rounds.  A rank that alone loses the answer is a rank whose connection broke; the others find that out in
their round, which has a deadline.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.errors import GroupClosedError, ReknitError
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group

logger = logging.getLogger("reknit")

LOOK_S = 2.0
"""A notice waits at most so long, and then for the end of the step that each rank is in."""
_CLOSE_S = 5.0


class EarlyRounds:
    """Decides with the threads of the other ranks which call of `begins` is a round of all ranks.

    `side` is a group for these threads alone, which `close` closes; `noticed` returns whether this rank has a
    notice.  `round` is the number of the call that is a round, 0 before a notice, and `waits` is whether the
    next call waits.  All ranks make this object before the same call.  Raises `ShortageError`, and closes the
    group, so that the threads of the other ranks end as well.
    """

    def __init__(self, side: Group, noticed: Callable[[], bool], timeout_s: float) -> None:
        self._side, self._noticed, self._timeout_s = side, noticed, timeout_s
        self._changed = threading.Condition()  # guards the three below
        self._num_begun, self.round = 0, 0
        self.waits = False
        self._over = threading.Event()
        try:
            self._thread = start_thread("reknit-notices", self._watch)
        except BaseException:
            side.close()
            raise

    def begins(self) -> bool:
        """Count a call of this rank, and return whether it is the round of all ranks."""
        with self._changed:
            while self.waits:
                self._changed.wait()
            self._num_begun += 1
            return self._num_begun == self.round

    def close(self) -> None:
        """Look for notices no longer."""
        self._over.set()
        self._side.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                if self._look():
                    self.meet()
                    return  # from now on the run itself has the notice
        except ReknitError as error:
            if not (self._over.is_set() or isinstance(error, GroupClosedError)):
                logger.warning("a notice may wait for the next planned round: %s", error)
            self._side.close()  # no other rank may wait for this one

    def _look(self) -> bool:
        """Return whether any rank has a notice."""
        with comm.turn(self._side, "look", self._timeout_s, merge=any) as turn:
            noticed = turn.gather(self._noticed())
            return turn.give_all(noticed is not None and any(noticed), bool)

    def meet(self) -> None:
        """Let all ranks hold a round at one call, which none of them has begun."""
        try:
            with comm.turn(self._side, "meet", self._timeout_s, merge=max) as turn:
                with self._changed:
                    self.waits = True
                    mine = self._num_begun
                begun = turn.gather(mine)
                highest = turn.give_all(None if begun is None else max(begun), int)
            with self._changed:
                self.round = highest + 1
        finally:
            with self._changed:
                self.waits = False
                self._changed.notify_all()
