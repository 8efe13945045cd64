"""The transport by which a replica of torchft gets its state from a checkpoint of a healthy one.

`ReknitTransport` goes into `torchft.Manager(checkpoint_transport=...)`.  The sender stages its state and goes
on; its agent writes, and the receiver loads when the step is committed, with every byte checked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import reknit
from reknit import Checkpointer
from reknit.errors import CheckpointNotFoundError, MissingExtraError, UsageError
from reknit.locations import location_text
from reknit.plugins.framework import is_declared, is_dtensor, tree
from reknit.plugins.store import Deadline
from reknit.plugins.trainer import Kept
from reknit.policies import latest

try:
    from torchft.checkpointing import CheckpointTransport
except ImportError as missing:
    raise MissingExtraError(
        f"reknit.integrations.torchft needs torchft: {missing}", remedy="pip install 'reknit[torchft]'"
    ) from None

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta
    from os import PathLike

    from reknit.options import LoadOptions, SaveOptions

_STATE = "state"
_POLL_S = 0.1
_KEPT = latest(2)
"""A receiver may still read the step before the newest one."""


class ReknitTransport(CheckpointTransport[Any]):  # type: ignore[misc]
    """Sends the state of a replica through a store that all replicas see, such as a folder or a bucket.

    Each transport has a folder of its own below `root`, with the last two steps that it sent.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        *,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        self._load_options = load_options
        # Each process sends its own state, also if it belongs to a process group.
        self._group = reknit.alone()
        self._root = f"{location_text(root).rstrip('/')}/{uuid4().hex}"
        self._checkpointer = Checkpointer(self._root, keep=_KEPT, options=options, group=self._group)

    def metadata(self) -> str:
        """Return the folder of this transport, which the manager sends to the receivers."""
        return self._root

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Save the state for all receivers; it may change as soon as this returns.

        Raises `UsageError` for a DTensor, and for a declared part of a larger tensor: the receiver would need
        the other ranks' parts.
        """
        if tree.any_leaf(state_dict, is_dtensor):
            raise UsageError(
                "the state that torchft sends has a DTensor",
                remedy="use torchft's PGTransport, which receives in place, or send to_local() of it",
            )
        if tree.any_leaf(state_dict, is_declared):
            raise UsageError(
                "the state that torchft sends has a part of a larger tensor",
                remedy="use torchft's PGTransport, which receives in place, or send detach() of it",
            )
        self._checkpointer.save(step, {_STATE: Kept(state_dict)})

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state that another transport sends, once it is committed.

        Raises `CheckpointNotFoundError` if it is not committed within the timeout.
        """
        path, kept = f"{metadata}/step_{step:08}", Kept()
        deadline = Deadline(timeout.total_seconds())
        while True:
            try:
                reknit.load(path, {_STATE: kept}, options=self._load_options, group=self._group)
            except CheckpointNotFoundError:
                if deadline.remaining() <= 0:
                    raise
                time.sleep(_POLL_S)
            else:
                return kept.values

    def disallow_checkpoint(self) -> None:
        """Do nothing: a state is copied before `send_checkpoint` returns."""

    def shutdown(self, wait: bool = True) -> None:
        """Wait for the last checkpoint; with ``wait=False`` the agent finishes it."""
        if wait:
            self._checkpointer.close()
