"""Both backends, for every test that is about what they have in common."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reknit.comm.tree.threads import thread_groups
from tests.comm.worlds import join_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.comm.base import Group
    from tests.comm.worlds import Join


@pytest.fixture(params=["threads", "tree-2"])
def join(request: pytest.FixtureRequest) -> Iterator[Join]:
    kind, _, fan_out = request.param.partition("-")
    with ExitStack() as stack:

        def make(size: int) -> Sequence[Group]:
            groups = thread_groups(size) if kind == "threads" else join_tree(size, int(fan_out))
            for group in groups:
                stack.callback(group.close)
            return groups

        yield make
