"""A store that also has files that it makes of others: unpacked members, tensors in order, and arrays."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
import zlib
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any

from reknit.errors import CorruptError
from reknit.storage.derived_paths import Cell, Inflated, StridedPart, derived
from reknit.storage.tensor_store import ZarrArrays
from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reknit.storage.base import Storage

_PIECE_NBYTES = 1 << 20


class DerivedStorage(ForwardingStorage):
    """A store around another one; a derived file is made once, in a file without a name on the local disk."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._made: dict[str, Any] = {}
        self._arrays: ZarrArrays | None = None
        self._making = threading.RLock()  # a derived file may be made of another one

    def around(self, inner: Storage, path: str) -> DerivedStorage:
        """Return the store below, which makes files too."""
        return DerivedStorage(inner)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, also of a derived one.

        Raises `CorruptError` for a part of an array whose file is missing.
        """
        rule = derived(path)
        if rule is None:
            return self.inner.size(path)
        if isinstance(rule, Cell):
            self._arrays_below().require(rule)
            return rule.itemsize * prod(rule.lengths)
        return rule.nbytes if isinstance(rule, Inflated) else rule.itemsize * prod(rule.shape)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, also from a derived file."""
        rule = derived(path)
        if rule is None:
            self.inner.read_into(path, start, buffers)
            return
        if isinstance(rule, Cell):
            self._arrays_below().read(rule, start, buffers)
            return
        file = self._file(path, rule)
        for buffer in buffers:
            if os.preadv(file.fileno(), [buffer], start) != len(buffer):
                raise CorruptError(f"{path} ends before byte {start + len(buffer)}")
            start += len(buffer)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs, also from a derived file."""
        if derived(path) is None:
            self.inner.read_runs(path, starts, nbytes, buffer)
        else:
            from reknit.storage import ranges  # it needs NumPy

            ranges.read_runs(self.read_into, path, starts, nbytes, buffer)

    def forget(self) -> None:
        """Remove the derived files."""
        with self._making:
            for file in self._made.values():
                file.close()
            self._made.clear()

    def close(self) -> None:
        """Close the inner store, and remove the derived files."""
        self.forget()
        super().close()

    def _arrays_below(self) -> ZarrArrays:
        with self._making:
            if self._arrays is None:
                self._arrays = ZarrArrays(self.url)
            return self._arrays

    def _file(self, path: str, rule: StridedPart | Inflated) -> Any:
        with self._making:
            if path not in self._made:
                with ExitStack() as failing:
                    file = failing.enter_context(tempfile.TemporaryFile())
                    if isinstance(rule, Inflated):
                        self._inflate(rule, file)
                    else:
                        self._put_in_order(rule, file)
                    file.flush()
                    failing.pop_all()
                weakref.finalize(self, file.close)  # a store of a folder above is not closed by itself
                self._made[path] = file
            return self._made[path]

    def _inflate(self, rule: Inflated, file: Any) -> None:
        """Unpack a member; it never gets more bytes than its size."""
        machine, left = zlib.decompressobj(-zlib.MAX_WBITS), rule.nbytes
        for start in range(rule.start, rule.start + rule.packed_nbytes, _PIECE_NBYTES):
            data = bytearray(min(_PIECE_NBYTES, rule.start + rule.packed_nbytes - start))
            self.read_into(rule.path, start, [memoryview(data)])
            packed: bytes | bytearray = data
            while packed and left:
                try:
                    out = machine.decompress(packed, min(left, _PIECE_NBYTES))
                except zlib.error as error:
                    raise CorruptError(f"{rule.path} has a member that cannot be unpacked") from error
                packed = machine.unconsumed_tail
                file.write(out)
                left -= len(out)
                if machine.eof:
                    break
        if left:
            raise CorruptError(f"{rule.path} has a member with fewer bytes than its directory says")

    def _put_in_order(self, rule: StridedPart, file: Any) -> None:
        """Write the elements of a tensor in row-major order, one after another of its first dimension."""
        import numpy as np  # by who reads such a tensor only: an agent that waits has no library

        reach = 1 + sum((n - 1) * s for n, s in zip(rule.shape, rule.strides, strict=True))
        data = np.empty(reach * rule.itemsize, np.uint8)
        self.read_into(rule.path, rule.start, [data.data])
        elements = np.lib.stride_tricks.as_strided(
            data.view(f"V{rule.itemsize}"),
            rule.shape,
            [stride * rule.itemsize for stride in rule.strides],
            writeable=False,
        )
        for part in elements:
            file.write(np.ascontiguousarray(part).tobytes())
