"""Files of GGUF in place: tensors as ranges of the file, and the metadata as values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reknit.engine.foreign.entries import MODEL, named
from reknit.engine.foreign.small_reads import part_of
from reknit.format.foreign.gguf_header import read_gguf_header

if TYPE_CHECKING:
    from reknit.engine.foreign.entries import ForeignEntries

METADATA_ITEM = "gguf"
BLOCKS_ITEM = "gguf_blocks"
"""The item with the quantisation of each tensor whose bytes are blocks."""


def add_gguf(entries: ForeignEntries, path: str) -> None:
    """Add the tensors of a file; quantised tensors come as the bytes of their blocks."""
    header = read_gguf_header(partial(part_of, entries.storage, path), entries.size(path))
    for key, value in header.metadata.items():
        entries.value(METADATA_ITEM, named([key]), value)
    for tensor in header.tensors:
        entries.whole(MODEL, named([tensor.name]), tensor.spec, path, tensor.start)
        if tensor.blocks is not None:
            entries.value(BLOCKS_ITEM, named([tensor.name]), tensor.blocks)
