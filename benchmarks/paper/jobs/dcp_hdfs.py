"""The way of torch DCP to HDFS: fsspec, with the client that reknit uses, and streams that count bytes.

The streams of hdfs-native have no position when they write, and fill no buffer when they read; DCP uses both.
"""

from __future__ import annotations

import io
from typing import Any

import fsspec
from hdfs_native.fsspec import HdfsFileSystem

BUFFER_NBYTES = 4 << 20


class CountedHdfs(HdfsFileSystem):
    """HDFS, whose streams are buffered and have a position."""

    def _open(self, path: str, mode: Any = "rb", *args: Any, **options: Any) -> Any:
        stream = super()._open(path, mode, *args, **options)
        if mode == "wb":
            return io.BufferedWriter(_Counted(stream), BUFFER_NBYTES)
        return io.BufferedReader(_Filling(stream), BUFFER_NBYTES)


class _Counted(io.RawIOBase):
    """A stream to write that counts its bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._position = stream, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self._stream.write(bytes(data))
        self._position += written
        return written

    def seek(self, offset: int, whence: int = 0) -> int:
        """Return the position, which `tell` asks for; there is no way to another one."""
        if (offset, whence) != (0, 1):
            raise io.UnsupportedOperation("seek")
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class _Filling(io.RawIOBase):
    """A stream to read that fills buffers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._stream.seek(offset, whence)
        return int(self._stream.tell())


def register() -> None:
    """Let fsspec open ``hdfs://`` by this client instead of one that needs Java."""
    fsspec.register_implementation("hdfs", CountedHdfs, clobber=True)
