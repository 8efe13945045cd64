"""Form a second group of the same ranks; the first group carries the addresses."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.comm.quiet import quietly
from reknit.engine import round_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.options import CommOptions


def side_group(group: comm.Group, name: str, options: CommOptions, timeout_s: float) -> comm.Group:
    """Form a second group of the same ranks, for the rounds of another thread; all ranks call this.

    Raises `CommError`, on all ranks or on none.
    """
    if group.size == 1:
        return comm.SoloGroup()
    with quietly():
        from reknit.comm.tree.tree_group import (
            TreeGroup,  # gRPC is loaded only when there is someone to talk to
        )

    side: TreeGroup | None = None
    try:
        with comm.turn(group, name, timeout_s) as turn:
            here, topology, generation = where_of(group, options), group.topology, group.generation
            side = TreeGroup(group.rank, topology, job=name, generation=generation, options=here)
            address = round_messages.ListenAddress(side.address, side.above)
            place = turn.give(places(turn.gather(address)), round_messages.TreeAddress)
        # The loss of a rank before it is connected would show only at the deadline of a round.
        with comm.turn(group, name, timeout_s) as turn:
            side.connect_parent(place.above)
            turn.arrive()
    except BaseException:
        if side is not None:
            side.close()
        raise
    return side


def where_of(group: comm.Group, options: CommOptions) -> CommOptions:
    """Return options that make a server listen at the host of the server of `group`, if this rank has one."""
    host = getattr(group, "host", None)
    if host is None or options.bind is not None or options.interface is not None:
        return options
    return dataclasses.replace(options, bind=host)


def places(
    ranks: Sequence[round_messages.ListenAddress] | None,
) -> list[round_messages.TreeAddress] | None:
    """Return for each rank the address of the rank above it, and the seed and number that all share.

    Only rank 0 has the addresses of all; other ranks have None, and get None.
    """
    if ranks is None:
        return None
    seed, number = secrets.token_hex(16), max(rank.number for rank in ranks)
    above = ["" if rank.above is None else ranks[rank.above].address for rank in ranks]
    return [round_messages.TreeAddress(address, seed, number) for address in above]
