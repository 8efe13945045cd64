"""The files of another program: their format, and the entries that reknit cannot read."""

from __future__ import annotations

from typing import NamedTuple


class Unread(NamedTuple):
    """An entry of another program's checkpoint that reknit cannot read, and the reason.

    Names below `fqn` belong to it as well; without an `fqn` it is the whole item.  With `is_damage`, the
    other program cannot read it either.
    """

    item: str
    fqn: str
    why: str
    is_damage: bool = False

    @property
    def name(self) -> str:
        """Its name in messages to users."""
        return f"{self.item}/{self.fqn}" if self.fqn else self.item

    def covers(self, name: str) -> bool:
        """Return whether a name in messages to users belongs to this entry."""
        return f"{name}/".startswith(f"{self.name}/")


class OtherFormat(NamedTuple):
    """The format of a checkpoint of another program, which is read in place.

    `is_file` is whether the checkpoint is one file, which lies in the folder above.  `unchecked` says which
    checks of its bytes are not possible, and names the entries that are `unread`.  `notes` has a sentence for
    each file that does not belong to the opened checkpoint though it lies there, such as an older model in
    the same folder.
    """

    kind: str
    is_file: bool
    unchecked: str
    unread: tuple[Unread, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


class Foreign(NamedTuple):
    """Files that another program saved: their kind, and a way to read them.

    `kind` is a short name of the format, empty for unknown files.  `is_file` is whether the path is that of
    a file, and not of a folder.
    """

    what: str
    remedy: str
    kind: str = ""
    is_file: bool = False
