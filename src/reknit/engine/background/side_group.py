"""One more group of ranks that have one: their addresses travel through the group that there is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.environment import quiet_grpc
from reknit.format import paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.tree.group import TreePort
    from reknit.options import CommOptions


def side_group(group: comm.Group, name: str, options: CommOptions, timeout_s: float) -> comm.Group:
    """Return one more group of the same ranks, for rounds that another thread holds; all ranks do so at once.

    Raises `CommError`, on all ranks or on none.
    """
    if group.size == 1:
        return comm.SoloGroup()
    quiet_grpc()
    from reknit.comm.tree.group import TreeGroup  # gRPC is loaded only when there is someone to talk to

    seats: list[TreePort] = []
    groups: list[comm.Group] = []

    def sit() -> bytes:
        here, topology, generation = where_of(group, options), group.topology, group.generation
        seat = TreeGroup.listen(group.rank, topology, job=name, generation=generation, options=here)
        seats.append(seat)
        return messages.encode(messages.ListenAddress(seat.address, seat.above))

    def climb() -> bytes:
        groups.append(seats[0].connect_parent(place.above))
        return b""

    try:
        place = messages.decode(comm.round(group, name, sit, places, timeout_s), messages.TreeAddress)
        # A rank that ends before it is connected would be missed only when a round of the new group takes
        # too long.
        comm.round(group, name, climb, lambda requests: [b""] * len(requests), timeout_s)
    except BaseException:
        for seat in seats:
            seat.close()
        raise
    return groups[0]


def where_of(group: comm.Group, options: CommOptions) -> CommOptions:
    """Return options by which a server listens where that of `group` does, if this rank has one there."""
    host = getattr(group, "host", None)
    if host is None or options.bind is not None or options.interface is not None:
        return options
    return dataclasses.replace(options, bind=host)


def places(requests: Sequence[bytes]) -> list[bytes]:
    """Tell each rank where the one above it is, and what all have in common from now on."""
    seats = [messages.decode(request, messages.ListenAddress) for request in requests]
    seed, number = paths.new_write_id(), max(seat.number for seat in seats)
    above = ["" if seat.above is None else seats[seat.above].address for seat in seats]
    return [messages.encode(messages.TreeAddress(address, seed, number)) for address in above]
