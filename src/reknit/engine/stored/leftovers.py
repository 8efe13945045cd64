"""Find the files that killed saves have left in a store, and remove them if they can never be committed.

Nothing is removed that belongs to a committed checkpoint, or to a save that may be under way:

- *Files that a manifest names stay*, and so does every file with its write id.  Manifests are read after the
  store was listed, so all that was committed by then is in a manifest.  If a manifest cannot be read, the
  whole folder stays.
- *Young files stay.*  If an uncommitted file in a checkpoint's folder is younger than the limit, the whole
  folder stays: a save may be at work there.
- *A save whose files go cannot commit.*  A save commits only while its marker is there (docs/decisions/0007).
  So the marker goes first.  Then the store is asked for a marker of that save, and for a manifest of its own,
  in this order, since a marker turns into a manifest.  Files go only if there is neither.  Parts of uploads
  and temporary files, without a name yet, are not part of a checkpoint: a save that finds them gone fails
  before it commits.

- *A late commit is made impossible.*  An object store may carry out a commit that the save has sent before.
  Where an index shows that, the manifest is changed, or a tombstone put in its place, before a file goes
  (`stored.commit`).  Without conditional writes, files stay as long as a store keeps a request.

One window of one request remains, between the last check and the first removal.  It matters only if a save
that was idle for longer than the limit puts its marker, checks its files and commits within it.  On an object
store, where a commit is a check and a write, markers have that window in any case.

Late listings are harmless: a file that is not listed is not removed.

A save may commit as long as its marker is in the folder of its checkpoint (docs/decisions/0007).  A save that
was killed leaves its marker too.  A marker does not name the hosts of its agents, and agents of other hosts
are not visible, so the two look the same from outside.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, defaultdict
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reknit.engine.stored.agents import at_work
from reknit.engine.stored.at_path import manifest_in, size_of
from reknit.engine.stored.commit import fence, is_blind, rule_out
from reknit.engine.stored.file_checks import whole_manifest
from reknit.engine.stored.marker import RETURNS_WITHIN_S, Begun, begun_in, named
from reknit.engine.stored.moving import remove_noted
from reknit.engine.stored.recognising import has_tombstone, is_of_others
from reknit.engine.stored.removals import REMOVAL_S, is_content, is_over, removing_copies
from reknit.engine.stored.steps import folder_in
from reknit.errors import DeadlineError, FormatError, StorageError, StoragePermissionError, UsageError
from reknit.events.phase import Deadline
from reknit.format import paths
from reknit.storage.base import LONGEST_REQUEST_S, CommitsLate, Listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.engine.stored.agents import AtWork
    from reknit.storage.base import Dated, Storage, Sweepable
    from reknit.types.manifest import Manifest


logger = logging.getLogger("reknit")

_PAUSES_S = (0.05, 2.0)


def wait_for_saves(root: Storage, timeout_s: float) -> None:
    """Wait until all saves directly below a folder are committed or have failed.

    Saves of this host are waited for from when they are staged, those of other hosts from when their markers
    are up.  A marker of a killed save is waited for until the timeout: agents of another host may still
    commit it.  Raises `DeadlineError` that names the saves left.
    """
    deadline, pause_s = Deadline(timeout_s), _PAUSES_S[0]
    waited_for, working = _begun_below(root), at_work(root.url)
    while waited_for or working:
        if deadline.passed():
            here = _processes(working) if working else "no agent"
            raise DeadlineError(
                f"saves below {root.url} were not over within {timeout_s:g} s: "
                f"{named(waited_for) or 'no marker is up yet'}; at work on this host: {here}",
                path=root.url,
                remedy="wait longer; or, if the processes of that run are dead on all hosts, keep its saves "
                "from ever committing with latest(root, pending='fence')",
            )
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(_PAUSES_S[1], pause_s * 1.5)
        if working and not (working := at_work(root.url)):
            waited_for = _begun_below(root)
        else:
            waited_for = [each for each in waited_for if size_of(each.folder, each.path) is not None]


def fence_off(root: Storage) -> None:
    """Fence all saves directly below a folder that have put their marker: they can never commit.

    A save that just begins may put its marker again, as if a rival had removed it.  So this takes some
    seconds, and looks again until no marker returns.

    A staged save without a marker is not fenced.  A warning names the agents of this host that are still at
    work; agents of other hosts cannot be seen.
    """
    begun = _begun_below(root)
    while begun:
        for each in begun:
            fence(each)
        time.sleep(RETURNS_WITHIN_S)
        begun = [again for each in begun for again in begun_in(each.folder) if again.save == each.save]
    if working := at_work(root.url):
        logger.warning(
            "agents of this host are at work below %s: %s; saves whose markers they put from now on may "
            "commit: end them first, then fence again",
            root.url,
            _processes(working),
        )


def _processes(agents: Sequence[AtWork]) -> str:
    own, pids = os.getpid(), sorted({agent.pid for agent in agents})
    return f"processes {', '.join(f'{pid} (this one)' if pid == own else str(pid) for pid in pids)}"


def _begun_below(root: Storage) -> list[Begun]:
    found: list[Begun] = []
    for name in root.folders():
        try:
            folder = root.sub(name)
        except StorageError:  # a name that no store takes
            continue
        with suppress(StoragePermissionError):  # `newest` passes such a folder over
            found += begun_in(folder)
    return found


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files that one save has left in one folder.

    `folder` is the folder of the checkpoint, relative to the searched folder; empty for that folder itself.
    `write_id8` is None for temporary files, whose names do not have the id of their save.  `modified` is the
    time of the last change of the youngest file.  `kept` is the reason why the files stay, or None.
    """

    folder: str
    write_id8: str | None
    found: tuple[Dated, ...]
    kept: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(each.nbytes for each in self.found)

    @property
    def modified(self) -> float:
        """When the youngest of it was last changed, in seconds since the epoch."""
        return max(each.modified for each in self.found)

    @property
    def kinds(self) -> dict[str, int]:
        """How many there are of each kind."""
        return dict(Counter(each.kind for each in self.found))


@dataclass
class _Folder:
    """The files in the folder of one checkpoint, except its manifest, by write id."""

    has_manifest: bool = False
    saves: defaultdict[str | None, list[Dated]] = field(default_factory=lambda: defaultdict(list))


def leftovers(storage: Storage, held: Iterable[Dated], before: float) -> list[Leftover]:
    """Return the files that saves have left in a store, by folder and write id.

    A file that was changed after `before` may be part of a save that is under way, and so may all in its
    folder.  Files that are not of reknit's making, by their names, are passed over.
    """
    found = []
    for name, folder in sorted(_by_folder(held).items()):
        if folder.has_manifest and len(folder.saves) == 1 and _are_plain_files(folder):
            continue  # these are the files of the checkpoint; or it is damaged, and not to be touched
        found += _in_folder(storage, name, folder, before)
    return found


def remove(storage: Storage, sweep: Sweepable, leftover: Leftover, open_at: Callable[[str], Storage]) -> bool:
    """Remove the files that a save has left, with copies elsewhere; return False for a save that needs them.

    Raises `UsageError` where somebody reads such a copy, `StorageError`.
    """
    folder = storage.sub(leftover.folder) if leftover.folder else storage
    markers = [each for each in leftover.found if _is_marker(each)]
    others = [each for each in leftover.found if not _is_marker(each)]
    was_sent = any(map(_is_index, others))  # maybe
    if was_sent and is_blind(folder) and sweep.moment() - leftover.modified < LONGEST_REQUEST_S:
        return False
    inside = {each: each.path[len(leftover.folder) :].lstrip("/") for each in others}
    files = [Listed(inside[each], each.nbytes) for each in others if each.kind == "file"]
    if not all(is_over(folder, file) for file in files):
        raise UsageError(
            f"files of {folder.url} are being deleted, or were without an answer of the store",
            path=folder.url,
            remedy=f"try again in {(REMOVAL_S + LONGEST_REQUEST_S) / 60:g} minutes",
        )
    for each in markers:
        storage.delete(each.path)
    # Files of a promotion have the names of its next try.
    recurs = any(is_content(file.path) for file in files)
    with removing_copies(storage, leftover.folder) if recurs else nullcontext(storage.delete) as delete:
        if leftover.write_id8 is not None and files:
            if _may_commit(folder, leftover.write_id8) or not _ruled_out(folder, leftover.write_id8):
                return False
            others.sort(key=_is_index)  # as long as it is there, the next sweep forbids a late commit again
        for each in others:
            if (place := _place(each.path)) is not None and place[1].kind == "copy":
                remove_noted(folder, inside[each], open_at)
            if each.kind == "file":
                delete(each.path)
            else:
                sweep.discard(each)
    return True


def _by_folder(held: Iterable[Dated]) -> dict[str, _Folder]:
    """Sort the files of reknit into the folders of checkpoints."""
    folders: defaultdict[str, _Folder] = defaultdict(_Folder)
    temporary = []
    for each in held:
        if each.kind == "temporary":
            temporary.append(each)
        elif (place := _place(each.path)) is not None:
            folder, name = place
            if name.kind == "manifest":
                folders[folder].has_manifest |= each.kind == "file"
            else:
                folders[folder].saves[name.write_id8].append(each)
    known = set(folders)  # by files whose names show it, in any order of the listing
    for each in temporary:
        here = each.path.rpartition("/")[0]
        above = here.rpartition("/")[0]
        folders[above if here not in known and above in known else here].saves[None].append(each)
    return folders


def _place(path: str) -> tuple[str, paths.FileName] | None:
    """Return the folder of a path's checkpoint, and the meaning of the rest; None if not ours."""
    parts = path.split("/")
    for depth in (1, 2):
        name = paths.parse_path("/".join(parts[-depth:])) if len(parts) >= depth else None
        if name is not None:
            return "/".join(parts[:-depth]), name
    return None


def _is_marker(each: Dated) -> bool:
    place = _place(each.path)
    return each.kind == "file" and place is not None and place[1].kind == "marker"


def _is_index(each: Dated) -> bool:
    place = _place(each.path)
    return each.kind == "file" and place is not None and place[1].kind == "index"


def _ruled_out(folder: Storage, write_id8: str) -> bool:
    """Return whether the store cannot commit a save any more, also if it received the request before."""
    if rule_out(folder, write_id8):
        return not isinstance(folder, CommitsLate) or not _may_commit(folder, write_id8)
    return is_blind(folder)  # its files are so old that the request is over


def _are_plain_files(folder: _Folder) -> bool:
    return all(
        each.kind == "file" and not _is_marker(each) for save in folder.saves.values() for each in save
    )


def _in_folder(storage: Storage, name: str, folder: _Folder, before: float) -> list[Leftover]:
    """Return the leftovers in one folder."""
    saves, kept = dict(folder.saves), None
    if folder.has_manifest:
        try:
            if (here := folder_in(storage, name) if name else storage) is None:
                return []
            manifest = manifest_in(here)
            if manifest is not None and manifest.moved_to is None:
                manifest = whole_manifest(here, manifest)
        except (FormatError, StoragePermissionError) as error:
            kept = f"the manifest there cannot be read: {error.message}"
        else:
            if manifest is not None:
                saves = _not_of(manifest, name, saves)
            elif is_of_others(here):
                kept = "the manifest there cannot be read: nothing shows that it is of reknit"
            elif not has_tombstone(here):
                return []  # the checkpoint is being removed
    if not any(saves.values()):
        return []
    if kept is None and max(each.modified for save in saves.values() for each in save) > before:
        kept = "a save may be under way there"
    return [
        Leftover(name, write_id8, tuple(save), kept)
        for write_id8, save in sorted(saves.items(), key=lambda item: item[0] or "")
        if save
    ]


def _not_of(
    manifest: Manifest, name: str, saves: dict[str | None, list[Dated]]
) -> dict[str | None, list[Dated]]:
    """Return the files outside of a checkpoint: of its own save only markers, and unfinished files."""
    prefix = f"{name}/" if name else ""
    moved = manifest.moved_to is not None  # then its files here were not removed yet
    named = {prefix + file.path for file in manifest.files if not moved}
    own, about = paths.short_id(manifest.write_id), paths.short_id(manifest.save_id)

    def needed(each: Dated, write_id8: str | None) -> bool:
        place = _place(each.path)
        is_note = place is not None and place[1].kind in paths.NOTE_KINDS
        return (write_id8 == own and not moved) or each.path in named or (is_note and write_id8 == about)

    return {
        write_id8: [
            each for each in save if each.kind != "file" or _is_marker(each) or not needed(each, write_id8)
        ]
        for write_id8, save in saves.items()
    }


def _may_commit(folder: Storage, write_id8: str) -> bool:
    """Return whether a save may commit here, or has; its marker was removed before this is called."""
    names = (paths.parse_path(listed.path) for listed in folder.list())
    if any(name is not None and name.kind == "marker" and name.write_id8 == write_id8 for name in names):
        return True
    try:
        manifest = manifest_in(folder)
        return manifest is not None and paths.short_id(manifest.write_id) == write_id8
    except FormatError:  # whose files these are is not known
        return True
