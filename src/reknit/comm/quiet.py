"""How gRPC is imported: without its reports of peers that ended, and without a trace in the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.environment import quiet_grpc, restore_grpc
from reknit.system import Switch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_quiet = Switch(quiet_grpc, restore_grpc)


def quietly() -> AbstractContextManager[None]:
    """Let gRPC, if it is imported meanwhile, report only errors."""
    return _quiet.turned()
