"""The decisions of rank 0 in each round of a load, and its memory between the rounds."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine import round_messages
from reknit.engine.loading.collect import left_of_made
from reknit.engine.loading.load_effects import idle_patterns, known_names, require_rules, require_some
from reknit.engine.loading.match import require_fit, terms
from reknit.engine.loading.metadata import Handout, RootMetadata, hand_out, read_for_all
from reknit.engine.loading.prefixes import prefix_hint
from reknit.engine.sharing.share_out import share_out
from reknit.engine.stored.places import changed
from reknit.errors import CommError
from reknit.types.rank_text import spelled
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.loading.collect import Collected
    from reknit.engine.loading.load_job import LoadJob
    from reknit.errors import ReknitError

logger = logging.getLogger("reknit")


class LoadCoordinator:
    """The decisions of one load.  Every rank makes one; only rank 0 calls its methods."""

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._handout: Handout | None = None
        self._collected: Collected | None = None
        self.metadata: RootMetadata | None = None
        """The metadata that rank 0 has read of the checkpoint; None on other ranks."""

    def open(self, wanted: Sequence[round_messages.Items]) -> list[round_messages.ItemContents]:
        """Read manifest, index and shared values, and answer each rank with its items."""
        self.metadata = self._job.within_deadline(
            "reading manifest and index of", lambda: read_for_all(self._job, wanted)
        )
        return self.metadata.answers

    def locate(
        self, collected: Collected, asked: Sequence[round_messages.Asked]
    ) -> list[round_messages.Answer]:
        """Answer each rank with the index rows of its tensors; `collected` has the entries of rank 0."""
        assert self.metadata is not None
        handout = hand_out(self.metadata.checkpoint, asked)
        self._collected = collected
        left = handout.left + left_of_made(collected, asked, handout.left)
        self._handout = handout._replace(left=left)
        return handout.answers

    def agree(self, loads: Sequence[round_messages.LoadRequest]) -> list[round_messages.LoadDecision]:
        """Raise one error that lists the unfit names of all ranks; without any, divide the reads."""
        assert self._handout is not None
        job, handout = self._job, self._handout
        taken = terms(job.options).takes
        unexpected = [name for key in handout.left if taken(name := full_name(*key))]
        self._require_use(loads, unexpected, handout)
        shares = share_out([load.offer for load in loads], job.options)
        early = any(load.early for load in loads)
        early_shares = share_out([load.early_offer for load in loads], job.options)
        return [
            round_messages.LoadDecision(unexpected, handout.items, share, early, early_share)
            for share, early_share in zip(shares, early_shares, strict=True)
        ]

    def _require_use(
        self, loads: Sequence[round_messages.LoadRequest], unexpected: Sequence[str], handout: Handout
    ) -> None:
        """Raise an error for names that do not fit, patterns that match nothing, and a load of nothing."""
        assert self.metadata is not None
        assert self._collected is not None
        job, url, collected = self._job, self._job.storage.url, self._collected
        whole, checkpoint = self.metadata.tensors, self.metadata.checkpoint
        saved = [*checkpoint.index.ids, *checkpoint.blob_names()]

        def hint(missing: Sequence[str]) -> str | None:
            left = set(unexpected)
            settled = [name for key in saved if (name := full_name(*key)) not in left]
            return prefix_hint(missing, left, settled, free=not job.options.transforms)

        require_rules(loads, collected)
        items = [*checkpoint.items, *handout.items]
        every = [*saved, *handout.left, *(each[:2] for each in whole)]
        idle, spare = idle_patterns(
            loads, job.options, job.lenient, partial(known_names, every, collected), items
        )
        damaged = handout.damaged
        require_fit(loads, unexpected, idle, job.lenient, url, spare=spare, damaged=damaged, hint=hint)
        odd = require_some(
            loads, lambda: [full_name(*each[:2]) for each in whole], hint, url, saved=bool(whole)
        )
        if odd is not None:
            logger.warning("the load of %s is done, but %s", url, odd)

    def finish(self, ends: Sequence[round_messages.Stopped]) -> None:
        """Raise an error when ranks stopped because of others and no rank has reported a cause."""
        stopped = [end for end in ends if end.why is not None]
        if stopped:
            ranks = spelled(one.rank for one in stopped)
            raise CommError(f"{ranks} could not go on: {stopped[0].why}", rank=stopped[0].rank, phase="load")

    def look_again(self, error: ReknitError) -> bool:
        """Return whether the checkpoint has changed.

        Raises `CheckpointNotFoundError` if it was deleted.
        """
        metadata, job = self.metadata, self._job
        return bool(metadata and changed(job.storage, metadata.checkpoint.manifest, error, job.replicas))
