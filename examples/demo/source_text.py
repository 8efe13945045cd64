"""Real text that every machine has: the sources of Python's own standard library, and batches of it.

Which bytes batch n holds depends on the seed and on n alone, not on the number of ranks.  So a resumed run
sees what an uninterrupted one would have seen, and runs on different numbers of ranks can be compared.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """Bytes to train on, and other bytes to test on."""

    training: Tensor
    held_out: Tensor


def read_text(max_nbytes: int = 2 << 20) -> Text:
    """Read modules of the standard library; every tenth is held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    held = 0
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        data = path.read_bytes()
        parts[number % 10 == 0].append(data)
        held += len(data)
        if held >= max_nbytes:
            break
    if held < max_nbytes // 8:
        raise SystemExit("this Python has no sources of its standard library to train on")
    return Text(*(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts))


def rows_of(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return rows of `length` bytes of `text`, as token ids."""
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def held_out_rows(text: Text, num_rows: int, length: int) -> Tensor:
    """Return rows that lie evenly over the held-out text."""
    starts = torch.linspace(0, len(text.held_out) - length, num_rows).long()
    return rows_of(text.held_out, starts, length)


class Batches:
    """An endless loader: `next(batches)` is this rank's share of the next global batch of `num_rows` rows.

    It has `state_dict` and `load_state_dict`, so it is saved and restored like everything else.  Its state is
    the same on all ranks, and means the same on any number of them.
    """

    def __init__(
        self, text: Tensor, *, num_rows: int, length: int, seed: int, part: int = 0, num_parts: int = 1
    ) -> None:
        if num_rows % num_parts:
            raise ValueError(f"{num_rows} rows cannot be shared equally by {num_parts} ranks")
        self.position = 0
        self._text, self._num_rows, self._length, self._seed = text, num_rows, length, seed
        share = num_rows // num_parts
        self._mine = slice(part * share, (part + 1) * share)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.position)
        starts = torch.randint(len(self._text) - self._length, (self._num_rows,), generator=generator)
        self.position += 1
        return rows_of(self._text, starts[self._mine], self._length)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is."""
        return {"position": self.position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where a loader was."""
        self.position, self._seed = state["position"], state["seed"]
