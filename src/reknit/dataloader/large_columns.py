"""Large columns of a source's state: in shared memory beside the encoded rest, ready to be mapped."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.dataloader.messages import SharedColumn
from reknit.processes.nameless import write_at
from reknit.types.shard import Tagged, is_large

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Columns = dict[str, NDArray[Any]]


def parted(source: int, state: Any, inline_nbytes: int) -> tuple[Any, Columns]:
    """Return a source's state with a placeholder for each large column, and these columns by their paths.

    A state with at most `inline_nbytes` bytes of columns is returned as it is.
    """
    columns: Mapping[str, NDArray[Any]] = {} if state is None else state["items"]
    if sum(column.nbytes for column in columns.values()) <= inline_nbytes:
        return state, {}
    large = {name: column for name, column in columns.items() if is_large(column.nbytes, inline_nbytes)}
    paths = {name: f"{source}/items/{name}" for name in large}
    holes = {name: Tagged("tensor", {"library": "numpy", "path": path}) for name, path in paths.items()}
    return {**state, "items": {**columns, **holes}}, {paths[name]: large[name] for name in large}


def joined(state: Any, columns: Columns) -> Any:
    """Return a source's state with its columns in the places of their placeholders."""
    if state is None:
        return None
    items = {
        name: columns[column.value["path"]] if isinstance(column, Tagged) else column
        for name, column in state["items"].items()
    }
    return {**state, "items": items}


def write_columns(fd: int, at: int, columns: Columns) -> tuple[list[SharedColumn], int]:
    """Write columns to a file from byte `at` on; return their places, and the first byte after them."""
    places = []
    for path, column in columns.items():
        at = next_page(at)
        places.append(SharedColumn(path, column.dtype.str, len(column), at))
        write_at(fd, at, np.ascontiguousarray(column).view(np.uint8).data)
        at += column.nbytes
    return places, at


def mapped_columns(memory: memoryview, places: Sequence[SharedColumn]) -> Columns:
    """Return the columns at these places of shared memory, which they keep alive."""
    return {place.path: np.frombuffer(memory, place.dtype, place.length, place.begin) for place in places}


def next_page(at: int) -> int:
    """Return the first byte of a page that is not before `at`."""
    return -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
