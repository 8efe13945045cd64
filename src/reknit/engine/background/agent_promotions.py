"""The promotions of one save, as an agent carries them out once the checkpoint is committed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reknit.engine.background import agent_messages as say
from reknit.engine.background.agent_job import TargetStore
from reknit.engine.stored.promote import promote_saved
from reknit.errors import typed
from reknit.options import LEAST_INFLIGHT_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm import group as comm
    from reknit.engine.saving.save_job import SaveJob
    from reknit.engine.small_files import Written

logger = logging.getLogger("reknit")


class AgentPromotions:
    """The stores to which a save is promoted, and which of these promotions are left."""

    def __init__(
        self,
        begin: say.Begin,
        job: SaveJob,
        ended: Callable[[say.Promoted], bool],
    ) -> None:
        """Call `ended` with the end of each promotion; it returns whether the trainer receives it."""
        self._number, self._job, self._ended = begin.number, job, ended
        self._url, self._write_id = begin.url, begin.claims.write_id
        self.targets = [url for url, *_ in begin.promote_to]
        """The stores to which the checkpoint is promoted."""
        self.stores = [TargetStore(place, job.options) for place in begin.promote_to]
        self.left = set(range(len(self.targets)))
        """Numbers of the targets whose promotions have not ended."""
        self.written: Sequence[Written] | None = None
        """The files that this rank wrote, once the checkpoint is committed."""

    def promote(self, target: int, group: comm.Group, num_lanes: int) -> None:
        """Copy the files of this rank to a target, together with all ranks, and report to the trainer.

        The copy may take the memory of a save divided by `num_lanes`.
        """
        assert self.written is not None
        share = max(self._job.options.inflight_nbytes // num_lanes, LEAST_INFLIGHT_NBYTES)
        job = replace(self._job, options=replace(self._job.options, inflight_nbytes=share))
        to = self.stores[target].target()
        try:
            report = promote_saved(job, self._write_id, self.written, group, to)
        except BaseException as error:  # also a bug: the trainer must receive it
            self.fail(target, error)
            return
        job.recorder.flush()
        self._ended(
            say.Promoted(
                number=self._number,
                target=target,
                error=None,
                path=report.path,
                nbytes=report.nbytes,
                num_files=report.num_files,
                records=[record.as_dict() for record in report.phases],
            )
        )

    def fail(self, target: int, error: BaseException) -> None:
        """Report the error of a promotion to the trainer, or log it if the trainer is gone."""
        failure = typed(error)
        failure.sign(rank=self._job.group.rank)
        if not self._ended(say.Promoted(self._number, target, failure.to_wire())):
            logger.error("promotion of %s to %s failed: %s", self._url, self.targets[target], failure)
