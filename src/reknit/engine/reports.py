"""The reports of saves, promotions, loads and checks, as values and as text for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import without_secrets
from reknit.events.progress import amount

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reknit.events.records import PhaseRecord
    from reknit.types.manifest import Manifest


_SHOWN = 3
"""Names that are shown of many."""
_MOST, _LAST = 160, 100
"""Characters that are shown of a fact, and how many of them are its last: paths differ at their ends."""


class Shown(ABC):
    """An object with a few facts to show; its full content may be long."""

    __slots__ = ()

    @abstractmethod
    def _facts(self) -> dict[str, object]:
        """Return the facts to be shown, by their names; None is left out."""

    def __repr__(self) -> str:
        try:
            facts = [f"{name}: {_line(fact)}" for name, fact in self._facts().items() if fact is not None]
        except Exception:  # a debugger shows objects that are half made, and errors whose text cannot be made
            return f"<{type(self).__name__}>"
        return f"<{type(self).__name__} {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align: left'>{escape(name)}</th>"
            f"<td style='text-align: left'>{escape(without_secrets(str(fact)))}</td></tr>"
            for name, fact in self._facts().items()
            if fact is not None
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _line(fact: object) -> str:
    """Return a fact as one line without its middle, where it is long."""
    text = without_secrets(" ".join(str(fact).splitlines()))
    return text if len(text) <= _MOST else f"{text[: _MOST - _LAST]}...{text[-_LAST:]}"


def some(names: Collection[str]) -> str | None:
    """Return the number of names, and the first of them; None without names."""
    if not names:
        return None
    first = ", ".join([name for name, _ in zip(names, range(_SHOWN), strict=False)])
    return f"{len(names)} ({first}{', ...' if len(names) > _SHOWN else ''})"


def logged(done: str, path: str, step: int | None, nbytes: int, by: str, *, seconds: float) -> str:
    """Return the line that the log has of a save or a load that went well."""
    of = "" if step is None else f" (step {step})"
    rate = f", {amount(nbytes / seconds)}/s" if seconds > 0 else ""
    return f"{done} {path}{of}: {amount(nbytes)}{by and ' '}{by} in {seconds:.3g} s{rate}"


def ranks(size: int) -> str:
    """Return a number of ranks in words."""
    return f"{size} rank{'' if size == 1 else 's'}"


def unchecked(manifest: Manifest) -> str | None:
    """Return the missing checks of a checkpoint of another program; None for a checkpoint of reknit."""
    if (other := manifest.other) is None:
        return None
    return f"a checkpoint of {other.kind}: {other.unchecked}"


def other_files(manifest: Manifest) -> dict[str, str]:
    """Return the files beside a checkpoint of another program that are not part of it, with the reasons."""
    return {} if manifest.other is None else dict(manifest.other.notes)


class SaveTotals(NamedTuple):
    """The figures of a save that `SaveReport` has too; an agent sends them to its trainer."""

    nbytes: int
    num_files: int
    total_nbytes: int
    reused_nbytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(Shown):
    """A committed checkpoint.

    `nbytes` and `num_files` count the files of this rank, `total_nbytes` those of all ranks.  Of `nbytes`,
    `reused_nbytes` were taken over from the checkpoint before.  `warnings` name stored data that looks wrong,
    such as copies that differ between ranks.  `phases` are this rank's.
    """

    path: str
    step: int | None
    write_id: str
    nbytes: int
    num_files: int
    total_nbytes: int
    warnings: tuple[str, ...]
    phases: tuple[PhaseRecord, ...]
    blocked_s: float
    waited_s: float = 0.0
    streamed: bool = False
    reused_nbytes: int = 0

    def _facts(self) -> dict[str, object]:
        reused = f", {amount(self.reused_nbytes)} taken over" if self.reused_nbytes else ""
        return {
            "path": self.path,
            "step": self.step,
            "size": amount(self.total_nbytes),
            "of this rank": f"{amount(self.nbytes)} in {self.num_files} files{reused}",
            "blocked": f"{self.blocked_s:.3g} s",
            "warnings": some(self.warnings),
        }


@dataclass(frozen=True, slots=True, repr=False)
class PromotionReport(Shown):
    """A committed checkpoint that is now at `path` too.

    `nbytes` and `num_files` count the files that this rank copied from `source`; `phases` are its own.
    """

    path: str
    source: str
    step: int | None
    write_id: str
    nbytes: int
    num_files: int
    phases: tuple[PhaseRecord, ...]

    def _facts(self) -> dict[str, object]:
        copied = f"{amount(self.nbytes)} in {self.num_files} files"
        return {"path": self.path, "source": self.source, "step": self.step, "copied": copied}


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport(Shown):
    """The result of a load on one rank, with everything that was not restored exactly.

    Names are `item/fqn`.  `restored`: tensors and values filled on this rank.  `missing`: wanted but not in
    the checkpoint; `unexpected`: in a loaded item of the checkpoint but wanted by no rank; `mismatched`:
    could not be taken as a whole (with the reason, and the part of a tensor of another shape).  These
    three are empty unless options of the load allow it.  `left`: items of the checkpoint that no rank asked
    for.  `cast`: converted to another dtype.  `resharded`: read from other boxes than this rank wanted.
    `notes`: left as it was by design, with the reason, such as a random state after a change of world size;
    or a tensor whose form in an object is not that of the saved state; or a file of another program
    beside the loaded files.  `nbytes_wanted` are the bytes of the
    boxes that this rank wanted, and `nbytes_read` the bytes that it read from storage, for other ranks too.
    `nbytes_received` are the bytes of the ranges that other ranks read for it.  `unchecked` says
    which checks the format of another program does not allow, and is None for a checkpoint of reknit.
    `saved_by` is the number of ranks that saved the checkpoint, None if that is not on record.
    """

    path: str
    step: int | None
    metadata: Mapping[str, Any]
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, str]
    left: tuple[str, ...]
    cast: tuple[str, ...]
    resharded: tuple[str, ...]
    notes: Mapping[str, str]
    nbytes_wanted: int
    nbytes_read: int
    nbytes_received: int
    phases: tuple[PhaseRecord, ...]
    unchecked: str | None = None
    saved_by: int | None = None

    def _facts(self) -> dict[str, object]:
        lists = ("missing", "unexpected", "mismatched", "cast", "resharded", "notes")
        return {
            "path": self.path,
            "step": self.step,
            "restored": f"{len(self.restored)} tensors and values, {amount(self.nbytes_wanted)}",
            **{name: some(getattr(self, name)) for name in lists},
            "unchecked": self.unchecked,
        }


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """The result of `reknit.verify`: `problems` name file and place, and are empty for a sound checkpoint.

    `level` is ``"metadata"`` or ``"data"``.  With ``"metadata"``, the tensors in `num_unread` data files of
    `nbytes_unread` bytes were not read, and `unread` says how to read them.  `unchecked` says which checks
    the format of another program does not allow.
    """

    path: str
    level: str
    num_files: int
    nbytes_checked: int
    problems: tuple[str, ...]
    num_unread: int = 0
    nbytes_unread: int = 0
    unchecked: str | None = None

    @property
    def ok(self) -> bool:
        """Return whether no problem was found in the files that were read."""
        return not self.problems

    @property
    def unread(self) -> str | None:
        """Name the bytes that were not read, and the call that reads them; None if all were read."""
        if not self.num_unread:
            return None
        return f"{self.unread_bytes()}; reknit.verify({self.path!r}, 'data') reads them"

    def unread_bytes(self) -> str:
        """Name the bytes that were not read."""
        files = f"{self.num_unread} data file{'s' * (self.num_unread != 1)}"
        return f"the tensors in {files} ({amount(self.nbytes_unread)}) were not read"

    def _facts(self) -> dict[str, object]:
        return {
            "path": self.path,
            "level": self.level,
            "ok": self.ok,
            "files": self.num_files,
            "unread": self.unread,
            "unchecked": self.unchecked,
            "problems": some(self.problems),
        }
