"""Markers decide which of several saves to one path may commit (docs/decisions/0007).

The order of the requests to the store makes this safe.  A save puts its marker before it looks for other
markers, and it looks for markers before it looks for the manifest, into which a marker turns.
"""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

from reknit.engine.memory.write import discard
from reknit.engine.stored.at_path import check_absent, is_committed, size_of
from reknit.engine.stored.removals import outlast_removal
from reknit.errors import CommitError, FencedError, FormatError, StorageNotFoundError
from reknit.events.phase import Deadline, monotonic
from reknit.format import paths
from reknit.format.manifest_file import MAX_MANIFEST_NBYTES, decode_generation
from reknit.system import dice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.engine.stored.run_record import Run
    from reknit.storage.base import Listed, Storage

_MOST_NAMED = 4
_Begins = Literal["save", "copy"]
_MOST_TRIES = 30
"""How often a save puts its marker while other saves and it remove each other's."""
_LONGEST_PAUSE_S = 1.0
RETURNS_WITHIN_S = 3 * _LONGEST_PAUSE_S
"""Within this time a save that begins puts a removed marker again: two pauses and a few requests."""
_ALONE_S = 2.0
"""How long a save that has lost its marker looks for the save that has removed it."""


class Marker(Struct, frozen=True):
    """The file that stands in a checkpoint's folder as long as a save may commit there."""

    generation: int
    write_id: str
    met: tuple[str, ...] = ()
    """Short ids of saves whose markers it removed; another of them may have removed this one meanwhile."""
    run: Run | None = None
    """The run that the save belongs to, which no newer one may have followed."""
    owns_index: bool = True
    """Whether the index of its write was written for this commit alone."""

    @property
    def path(self) -> str:
        """Its path in the store."""
        return paths.marker_path(self.generation, self.write_id)


def take_marker(
    storage: Storage, mine: Marker, *, overwrite: bool, newest: bool = False, is_copy: bool = False
) -> Marker:
    """Put a marker there and return it, as `put_marker` does; raise as `check_absent` for files that stay.

    Raises `CommitError` where the store may still delete files of the names of this save.  Only those of a
    copy have been there before.
    """
    # Also before, so that nothing is touched where there is a checkpoint.
    check_absent(storage, overwrite=overwrite)
    mine = put_marker(storage, mine, newest=newest, begins_as="copy" if is_copy else "save")
    try:
        if not overwrite:
            check_absent(storage, overwrite=overwrite)
    except BaseException:
        remove_marker(storage, mine)
        raise
    return mine


def put_marker(
    storage: Storage, mine: Marker, *, newest: bool = False, begins_as: _Begins | None = None
) -> Marker:
    """Put the marker of this save there, so that no save which began here before can commit, and return it.

    One that begins is refused where files may still be deleted (`CommitError`).

    If the path has a higher generation, a save that is the `newest` takes that generation, since clocks may
    differ.  Any other save raises `FencedError`: a newer run of the job is at work here, or has been.  It
    also raises if a newer run has opened the folder above.  After any error the marker is removed again, as
    far as the store still answers.

    Saves that begin at the same moment remove each other's markers.  A save whose marker is gone raises
    `FencedError` if another save continues, and else puts its marker again: of all these saves, one begins.
    """
    tries = 0
    while True:
        began, tries = monotonic(), tries + 1
        try:
            others, manifest, outrun = _placed_among(storage, mine, begins_as=begins_as)
            if mine.run is not None:
                mine.run.check()
            if outrun is not None and not newest:
                raise outrun.error(storage, mine)
            mine = structs.replace(mine, met=(*mine.met, *(path.rpartition(".")[2] for path in others)))
            pause_s = min(monotonic() - began, _LONGEST_PAUSE_S)
            if outrun is None:
                if not others or _stays(storage, mine, manifest, pause_s):
                    return mine
                if tries == _MOST_TRIES:
                    raise fenced_off(storage, mine)
                sleep(dice.uniform(0, min(pause_s * 2.0 ** min(tries, 32), _LONGEST_PAUSE_S)))
        except BaseException:
            remove_marker(storage, mine)
            raise
        if outrun is not None:
            remove_marker(storage, mine)
            mine = structs.replace(mine, generation=outrun.generation)


def remove_marker(storage: Storage, mine: Marker) -> None:
    """Keep this save from ever being committed, if it is not yet.

    If the store does not even delete the marker any more, the next save to this path does.
    """
    discard(storage, mine.path)


def is_last(storage: Storage, mine: Marker, manifest: bytes) -> bool:
    """Return whether no other save that may commit has begun here since this one committed `manifest`.

    If so, no save needs the files of other saves that were there before this call.
    """
    if any(generation >= mine.generation for generation in _others(storage, mine).values()):
        return False
    return storage.get(paths.MANIFEST_PATH, limit=MAX_MANIFEST_NBYTES) == manifest


def fenced_off(storage: Storage, mine: Marker) -> CommitError:
    """Return the error of a save whose marker is gone when it is about to commit.

    It is a `FencedError` if another save is here, or has committed, or was seen before.
    """
    deadline = Deadline(_ALONE_S)
    while (alone := _is_alone(storage, mine)) and not deadline.passed():
        sleep(_ALONE_S / 5)  # the save that removed the marker may be about to put its own again
    if alone:
        return (FencedError if mine.met else CommitError)(
            "the marker of this save was removed while it was under way, or the store has lost it, and no "
            "other save is here now; nothing is committed",
            path=f"{storage.url}/{mine.path}",
            remedy="save again, let only one save at a time go to a path, and delete no files of a save that "
            "is under way, also not with `reknit gc`; if it happens again, the store loses files",
        )
    there = is_committed(storage, mine.write_id)
    fate = "its checkpoint is there, and the other may replace it" if there else "it is not committed"
    return FencedError(
        "another save to this path began while this one (generation "
        f"{mine.generation}) was under way, and took its marker away; {fate}",
        path=f"{storage.url}/{mine.path}",
        remedy="end this process if a newer run of its job has taken its place; if not, give each job a path "
        "of its own, and let only one save at a time go to a path",
    )


class Begun(Struct, frozen=True):
    """A save that may yet commit: its folder, the marker in it, and the generation of its run."""

    folder: Storage
    path: str
    generation: int

    @property
    def url(self) -> str:
        """Where the marker is."""
        return f"{self.folder.url}/{self.path}"

    @property
    def save(self) -> str:
        """The short id of the save, which may put a marker of another generation."""
        return self.path.rpartition(".")[2]


def begun_in(folder: Storage, files: Iterable[Listed] | None = None) -> list[Begun]:
    """Return the saves that may yet commit in a checkpoint's folder, by its `files` (default: all)."""
    listing = folder.list() if files is None else files
    names = {listed.path: paths.parse_path(listed.path) for listed in listing}
    return [
        Begun(folder, path, name.generation)
        for path, name in names.items()
        if name is not None and name.generation is not None
    ]


def named(begun: Sequence[Begun]) -> str:
    """Return the places of markers as text, with the markers of the newest runs first."""
    newest = sorted(begun, key=lambda each: (-each.generation, each.url))
    more = f" and {len(begun) - _MOST_NAMED} more" if len(begun) > _MOST_NAMED else ""
    return ", ".join(each.url for each in newest[:_MOST_NAMED]) + more


class _Outrun(Struct, frozen=True):
    """A file that shows a newer run than that of a save, and its generation."""

    path: str
    generation: int

    def error(self, storage: Storage, mine: Marker) -> FencedError:
        """Return the error of a save that may not commit here.

        A marker may be deleted where its run is dead; a manifest is the only way to a checkpoint, and never.
        """
        at = f"{storage.url}/{self.path}"
        if self.path == paths.MANIFEST_PATH:
            what = "has saved to this path already"
            how = f"start it with CommOptions(generation={self.generation + 1})"
        else:
            what = "is saving to this path"
            how = f"delete {at} first"
        return FencedError(
            f"a newer run (generation {self.generation}) {what}; this process belongs to generation "
            f"{mine.generation} and must not commit",
            path=at,
            remedy="end this process if that run has taken its place; if the two have nothing to do with "
            f"each other, save to another path; if that run is dead and this one is to go on here, {how}",
        )


def _placed_among(
    storage: Storage, mine: Marker, *, begins_as: _Begins | None
) -> tuple[Iterable[str], bytes | None, _Outrun | None]:
    """Put a marker there and delete older ones.

    Returns the others, the manifest, which is not read if a marker is of a newer run, and a file of a newer
    run, if any.
    """
    storage.put(mine.path, b"", if_absent=True)
    files = list(storage.list())
    if begins_as is not None and outlast_removal(storage, files, is_copy=begins_as == "copy"):
        files = list(storage.list())  # another save may have begun meanwhile
    others = _others(storage, mine, files)
    for path, generation in others.items():
        if generation > mine.generation:
            return others, None, _Outrun(path, generation)
    for path in others:
        storage.delete(path)
    manifest = _manifest_bytes(storage)
    generation = _generation_of(manifest)
    newer = generation > mine.generation
    return others, manifest, _Outrun(paths.MANIFEST_PATH, generation) if newer else None


def _stays(storage: Storage, mine: Marker, manifest: bytes | None, pause_s: float) -> bool:
    """Return whether a marker is still there after a pause, in which saves that have listed it remove it.

    Raises `FencedError` if it is gone, and another save continues or has replaced the `manifest`.
    """
    sleep(pause_s)
    if size_of(storage, mine.path) is not None:
        return True
    rivals = [each for each in _others(storage, mine).values() if each >= mine.generation]
    if rivals or _manifest_bytes(storage) != manifest:
        raise fenced_off(storage, mine)
    return False


def _others(storage: Storage, mine: Marker, files: Iterable[Listed] | None = None) -> dict[str, int]:
    """Return the markers of other saves, by path, with their generations."""
    return {begun.path: begun.generation for begun in begun_in(storage, files) if begun.path != mine.path}


def _is_alone(storage: Storage, mine: Marker) -> bool:
    """Return whether no other save that may commit is here, and none has committed."""
    others = (*_others(storage, mine).values(), _generation_of(_manifest_bytes(storage)))
    return max(others) < mine.generation


def _manifest_bytes(storage: Storage) -> bytes | None:
    try:
        return storage.get(paths.MANIFEST_PATH, limit=MAX_MANIFEST_NBYTES)
    except StorageNotFoundError:
        return None


def _generation_of(manifest: bytes | None) -> int:
    """Return the generation of the run that committed a manifest; -1 without one, or for a damaged one."""
    try:
        generation = None if manifest is None else decode_generation(manifest)
    except FormatError:  # any run may replace a damaged manifest
        return -1
    return -1 if generation is None else generation
