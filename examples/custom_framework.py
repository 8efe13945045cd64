"""A type that reknit does not know, saved by two ranks and loaded by three: run this file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit.plugins.framework import Held, Value, register_framework
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reknit.comm.group import Group

ROWS, WIDTH, BLOCK = 10, 3, 2


class Table:
    """An embedding table whose rows are dealt out to the ranks in small blocks, like cards."""

    def __init__(self, rank: int, size: int, value: float = 0.0, lookups: int = 0) -> None:
        starts = range(rank * BLOCK, ROWS, size * BLOCK)
        self.blocks = {start: np.full((BLOCK, WIDTH), value + start, np.float32) for start in starts}
        self.lookups = lookups


class Tables:
    """All that reknit has to be told about tables."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is one."""
        return isinstance(value, Table)

    def holdings(self, value: Table, rank: int, size: int) -> Iterator[Held | Value]:
        """Say which box of the whole table each block is; its memory is read by a save, filled by a load."""
        for start, block in value.blocks.items():
            yield Held("rows", (ROWS, WIDTH), "float32", (start, 0), block.shape, block)
        yield Value("lookups", value.lookups)

    def restore(self, value: Table, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        """Take over what was loaded: the blocks are filled already."""
        value.lookups = values.get("lookups", value.lookups)


def main() -> None:
    """Save on two ranks (threads here), load on three."""
    register_framework(Tables())
    with tempfile.TemporaryDirectory() as folder:
        save_and_load(Path(folder) / "checkpoint")


def save_and_load(folder: Path) -> None:
    """Save two parts of a table, and load three of another."""

    def save(group: Group) -> None:
        reknit.save(folder, {"table": Table(group.rank, group.size, 100.0, 7)}, group=group).result()

    def load(group: Group) -> None:
        table = Table(group.rank, group.size)
        reknit.load(folder, {"table": table}, group=group)
        assert table.lookups == 7
        assert all(np.all(block == 100.0 + start) for start, block in table.blocks.items())

    run_ranks(2, save)
    run_ranks(3, load)
    print("saved on 2 ranks, loaded on 3:", reknit.open(folder).tensors)


if __name__ == "__main__":
    main()
