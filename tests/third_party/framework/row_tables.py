"""Tables whose rows are distributed over the ranks in blocks."""

import numpy as np

from reknit.plugins.framework import Held, Value

ROWS, WIDTH, BLOCK = 10, 3, 2


class Table:
    def __init__(self, rank, size, value=0.0, lookups=0):
        starts = range(rank * BLOCK, ROWS, size * BLOCK)
        self.blocks = {start: np.full((BLOCK, WIDTH), value + start, np.float32) for start in starts}
        self.lookups = lookups


class Tables:
    def matches(self, value):
        return isinstance(value, Table)

    def holdings(self, value, rank, size):
        for start, block in value.blocks.items():
            yield Held("rows", (ROWS, WIDTH), "float32", (start, 0), block.shape, block)
        yield Value("lookups", value.lookups)

    def restore(self, value, held, values):
        value.lookups = values.get("lookups", value.lookups)
