"""The part of one rank in a save: its holdings, its claims, and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine import round_messages
from reknit.engine.memory.sources import Sources
from reknit.engine.packed_columns import unpacked
from reknit.engine.saving.claims import encode_holdings
from reknit.engine.saving.compared_copies import choose
from reknit.engine.saving.file_layout import FileCut, layout_digest, outline
from reknit.types.lazy_property import lazy_property

if TYPE_CHECKING:
    from reknit.engine.saving.compared_copies import Chosen
    from reknit.engine.saving.file_layout import Outline
    from reknit.engine.saving.save_job import SaveJob

_MOST_PARTS = 64
"""Files of an item on one rank: if one tensor changes, a hundredth of the bytes is written again."""
_MOST_FILES = 1024
"""Files of an item on all ranks that store parts: each file costs a request, and an entry in the index."""


class RankPart:
    """The holdings of a rank with their encoded values, and the data that it derives from them alone."""

    def __init__(self, job: SaveJob) -> None:
        """Collect the holdings.  Raises `StateError` for a part of the state that no file can hold."""
        self.job = job
        with job.recorder.phase("collect"):
            self.encoded = encode_holdings(job.holdings(), job.options)
            self.sources = Sources(shard.memory for shard in self.encoded.holdings.shards)
        self._copies = round_messages.NO_COPIES

    @property
    def needs_assignment(self) -> bool:
        """Whether there are shards whose other holders no framework records."""
        return bool(self.encoded.guessed)

    @lazy_property
    def layout(self) -> bytes:
        """The `layout_digest` of the holdings."""
        return layout_digest(self.encoded.holdings, self._cut)

    def compare(self, chosen: Chosen | None = None) -> Chosen:
        """Digest the copies that other ranks may also hold, and return the chosen shards.

        `chosen` is the result of an earlier save of the same layout.
        """
        job = self.job
        with job.recorder.phase("digest"):
            chosen = chosen or choose(
                self.encoded, job.options.check_replicas, job.group.rank, job.group.size
            )
            self._copies = chosen.copies(self.sources)
        return chosen

    def claims(
        self, write_id: str = "", plan: bytes = b"", *, shards: bool = True
    ) -> round_messages.RankClaims:
        """Return the claims of this rank, without shards if the root has the shards of this `plan`."""
        encoded = self.encoded
        return round_messages.RankClaims(
            write_id=write_id,
            step=self.job.step,
            plan=plan,
            shards=encoded.shard_claims() if shards else None,
            blobs=encoded.blobs,
            copies=self._copies,
            witnesses=encoded.witnesses,
            places=len(self.job.promote_to),
        )

    def outline(self, owners: bytes = b"") -> Outline:
        """Return the files that this rank writes; `owners` has the owners of the shards that it claimed."""
        holdings = self.encoded.resolved(unpacked(owners, "i8"))
        return outline(holdings, self.job.group.rank, self._cut)

    @property
    def _cut(self) -> FileCut:
        """The cut into files: several for each item if the store can take over the unchanged ones."""
        job = self.job
        takes_over = job.options.reuse and getattr(job.storage, "copy_from", None) is not None
        num_parts = max(1, min(_MOST_PARTS, _MOST_FILES // job.group.size)) if takes_over else 1
        return FileCut(job.options.max_file_nbytes, num_parts)
