"""A record of the functions of reknit that the training thread calls while it saves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from reknit.processes.channel import Channel

if TYPE_CHECKING:
    from types import FrameType

_LOCAL = {"shard_key", "check_manifest", "keep_latest", "packed", "unpacked"}
"""Functions of the modules below that, with all that they call, only look at this rank's own values."""

_AGREEING = (
    "reknit.comm.",
    "reknit.engine.stored.commit",
    "reknit.engine.stored.marker",
    "reknit.engine.saving.coordinator",
    "reknit.engine.saving.root",
)


class Watched:
    """The calls of this thread in a ``with`` block.

    `agreed` has the functions that agree with other ranks, commit, or wait for others, `planned` those of the
    planner, and `said` the types of the messages to the agent.
    """

    def __init__(self) -> None:
        self.agreed: set[str] = set()
        self.planned: set[str] = set()
        self.said: list[str] = []
        self._local: FrameType | None = None

    def __enter__(self) -> Watched:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        module, name = str(frame.f_globals.get("__name__", "")), code.co_name
        if frame is self._local and event == "return":
            self._local = None
        if event != "call" or self._local is not None or name == "__init__":
            return
        if name in _LOCAL and module.startswith("reknit."):
            self._local = frame
        elif code is Channel.send.__code__:
            self.said.append(type(frame.f_locals["message"]).__name__)
        elif module.startswith("reknit.planner.") or (
            module == "reknit.engine.saving.layout" and name == "outline"
        ):
            self.planned.add(f"{module}.{name}")
        elif module.startswith(_AGREEING) or name in ("owners", "ask"):
            self.agreed.add(f"{module}.{name}")
