"""The driver of a save, in numbered steps: the state of a rank becomes part of a committed checkpoint.

A save that waits and a save in the background take the same steps, each with its own writer.  `Here`
(`engine.saving.here`) writes and commits in this process.  `AtAgent` (`engine.background.at_agent`) copies to
memory that an agent shares, and the agent writes and commits with a `Here` of its own.  The call of the user
has read its arguments (step 1) and chosen the writer (step 2) before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from reknit.engine.saving.part import encode, lay_out

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from reknit.engine.saving.layout import LiveFiles, Owners
    from reknit.engine.saving.part import Part
    from reknit.engine.saving.task import SaveTask


class SaveWriter(Protocol):
    """The part of a save that differs between a process that waits for it, and one that does not."""

    def rounds(self) -> AbstractContextManager[None]:
        """Return the block in which a rank saves: an error in it is raised on all ranks."""

    def open(self) -> bool:
        """Open the store, if this process writes; return whether it takes over files that did not change.

        Raises the error of the arguments.
        """

    def assign(self, part: Part) -> Owners:
        """Claim the data that other ranks may hold, too, and return the owners as far as they are needed."""

    def write(self, files: LiveFiles) -> None:
        """Write the data files, or copy them, so that only `commit` is left to do in this process."""

    def commit(self, files: LiveFiles) -> None:
        """Send the receipt for the files, or leave that to an agent."""


def save(task: SaveTask, writer: SaveWriter) -> None:
    """Save as one rank of a group, with all others.

    All ranks return, or all raise the same error.  With `Here` the checkpoint exists then; with `AtAgent` the
    state may change.
    """
    with writer.rounds():  # an error in here reaches every rank
        # 3 Open the store, in the process that will write (local).
        takes_over = writer.open()
        # 4 Gather the shards and values of this rank, as views of live memory.  5 Encode the values (local).
        with task.recorder.phase("collect"):
            part = encode(task.holdings(), task, takes_over=takes_over)
        # 6 Assign owners for data whose holders no framework records (one round).
        owners = writer.assign(part)
        # 7 Lay out the files: all holders of a tensor compute the same cut, without a message (local).
        files = lay_out(part, owners)
        # 8 Stage, digest and write, except files that the last checkpoint has (local).
        writer.write(files)
        # 9 Commit: values are written, receipts go to the root, which writes index and manifest (one round).
        writer.commit(files)
