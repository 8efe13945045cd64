"""Import of gRPC without its reports and its fork handlers, and without a trace in the environment."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from reknit.environment import grpc_handles_forks, remove_grpc_variables, set_grpc_variables
from reknit.system import Switch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_log = logging.getLogger("reknit.comm")
_quiet = Switch(set_grpc_variables, remove_grpc_variables)


def quietly() -> AbstractContextManager[object]:
    """Let gRPC, if it is imported meanwhile, report only errors, and do nothing in forked processes."""
    if "reknit.comm.serving" not in sys.modules and grpc_handles_forks():
        _log.warning(
            "gRPC acts in processes that this one forks: workers of a data loader may end with a segmentation"
            " fault; set GRPC_ENABLE_FORK_SUPPORT=0 before gRPC is imported"
        )
    return _quiet.turned()
