"""How large files may be that are read as a whole; a manifest that lists a larger one is refused."""

MAX_INDEX_NBYTES = 1 << 30
"""The index, with the table of files in it."""

MAX_BLOBS_NBYTES = (1 << 32) - 1
"""A file of values, which is also the longest single value that msgpack holds."""
