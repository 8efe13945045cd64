"""Choose the number of writing threads and the piece size, measured on the first bytes saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reknit.environment import num_threads
from reknit.errors import UsageError
from reknit.options import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS = (1, 2, 4)
PIECES = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
"""Piece sizes: multiples of the checksum block, and divisors of the largest size."""
WINDOW_NBYTES = 128 * MIB
"""The least number of bytes that are written for one measurement."""

_USUAL_PIECE = 8 * MIB
_TURNS = 4
_CLOSE = 0.95


class Settings(NamedTuple):
    """How files are written: the number of threads, and the size of the piece that each thread holds."""

    threads: int
    piece_nbytes: int


class Tuner:
    """Tries each of a few settings on some bytes of real saves, and keeps the fastest.

    It writes nothing itself.  While it is `measuring`, the writer takes `settings`, writes `window_nbytes`
    with them, and passes the time that this took to `observe`.  A save that ends earlier leaves the rest of
    the settings to the next save.  The result holds for one kind of store, while the tuner lives.

    A setting that is passed as `threads` or `piece_nbytes` is fixed; with both there is nothing to measure.
    `share` is the number of threads that this rank's share of the cores allows.  Two threads are tried even
    if it is one, because a thread that writes past the page cache mostly waits for the disk.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        piece_nbytes: int | None = None,
        share: int | None = None,
        window_nbytes: int = WINDOW_NBYTES,
    ) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, not {threads}")
        if piece_nbytes is not None and piece_nbytes not in PIECES:
            raise UsageError(f"a piece has 4, 8, 16 or 32 MiB, not {piece_nbytes} bytes")
        share = num_threads(None) if share is None else share
        self._usual = Settings(threads or share, piece_nbytes or _USUAL_PIECE)
        self._window_nbytes = window_nbytes
        self._rates: dict[Settings, float] = {}
        if threads is not None and piece_nbytes is not None:
            self.candidates: tuple[Settings, ...] = (self._usual,)
        else:
            self.candidates = tuple(_grid(self._usual, threads, piece_nbytes, max(share, 2)))

    @property
    def measuring(self) -> bool:
        """Whether a candidate is left to be measured."""
        return len(self.candidates) > 1 and len(self._rates) < len(self.candidates)

    @property
    def settings(self) -> Settings:
        """The settings for the next window: the next candidate, or the best when all are measured."""
        if not self.measuring:
            return self.best
        return next(candidate for candidate in self.candidates if candidate not in self._rates)

    @property
    def best(self) -> Settings:
        """The fewest threads, then the smallest pieces, that come close to the fastest measured so far."""
        if not self._rates:
            return self._usual
        enough = _CLOSE * max(self._rates.values())
        return min(settings for settings, rate in self._rates.items() if rate >= enough)

    @property
    def window_nbytes(self) -> int:
        """Bytes to write with `settings`: several pieces per thread, since the last leave threads idle."""
        threads, piece_nbytes = self.settings
        return max(self._window_nbytes, _TURNS * threads * piece_nbytes)

    def observe(self, settings: Settings, nbytes: int, seconds: float) -> Settings:
        """Record the time that a candidate took for some bytes; return the settings for the next bytes."""
        if settings in self.candidates:
            self._rates[settings] = nbytes / max(seconds, 1e-9)
        return self.settings


def _grid(usual: Settings, threads: int | None, piece_nbytes: int | None, most: int) -> Iterator[Settings]:
    """Yield the candidates: the usual settings first, for saves that end before all are measured."""
    counts = (threads,) if threads is not None else tuple(count for count in THREADS if count <= most)
    sizes = (piece_nbytes,) if piece_nbytes is not None else PIECES
    yield usual
    yield from (Settings(n, size) for n in counts for size in sizes if (n, size) != usual)
