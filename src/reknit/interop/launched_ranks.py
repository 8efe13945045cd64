"""The ranks of a command that a launcher such as torchrun started several times."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit import ranks
from reknit.environment import launch
from reknit.options import CommOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.comm.group import Group


@contextmanager
def launched() -> Iterator[Group]:
    """Connect the processes that a launcher started, for the duration of the block; else be alone."""
    if launch() is None:
        yield ranks.alone()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield ranks.acting(None, CommOptions()).group
    finally:
        dist.destroy_process_group()
