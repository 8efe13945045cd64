"""Orbax's checkpointers, which save one checkpoint at a path of its own, and their handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orbax import checkpoint as ocp

import reknit
from reknit.errors import CheckpointExistsError, UsageError, shown
from reknit.integrations.orbax.items import (
    CUSTOM,
    DEFAULT,
    TREE,
    contents,
    is_kept,
    items_at,
    kept_value,
    located,
    require_item,
    restored,
    restored_tree,
    saved_state,
)
from reknit.locations import location_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from reknit import Checkpoint, PendingSave
    from reknit.options import SaveOptions


class _Handler:
    """Saves one kind of object.  Options of Orbax's files (`use_ocdbt`, `use_zarr3`, …) have no effect."""

    save_args: Any
    restore_args: Any

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take and ignore the options of Orbax's own files."""

    def save(
        self, directory: str | PathLike[str], item: Any = None, *more: Any, args: Any = None, **kwargs: Any
    ) -> None:
        """Save an object as one checkpoint, and wait for its commit."""
        write(directory, self.as_save(item, *more, args=args, **kwargs), wait=True).result()

    def restore(
        self, directory: str | PathLike[str], item: Any = None, *more: Any, args: Any = None, **kwargs: Any
    ) -> Any:
        """Restore an object from a checkpoint, or from an item of one."""
        return read(directory, self.as_restore(item, *more, args=args, **kwargs))

    def metadata(self, directory: str | PathLike[str]) -> Any:
        """Return the object with abstract arrays."""
        path, item = located(directory)
        with reknit.open(path) as checkpoint:
            return described(checkpoint, item)

    def finalize(self, directory: str | PathLike[str]) -> None:
        """Do nothing: a save has its commit already."""

    def close(self) -> None:
        """Do nothing: a handler holds nothing open."""

    def as_save(self, *items: Any, args: Any = None, **kwargs: Any) -> Any:
        """Return the arguments of a save, whether given as such or as an object."""
        return _given(self.save_args, args, items, kwargs)

    def as_restore(self, *items: Any, args: Any = None, **kwargs: Any) -> Any:
        """Return the arguments of a restore, whether given as such or as a target."""
        return _given(self.restore_args, args, items, kwargs)


def _given(kind: Any, args: Any, items: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if args is None:
        return kind(*items, **kwargs)
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise UsageError(
            f"args are of orbax.checkpoint.args, not {shown(args)}",
            remedy="for instance args=ocp.args.StandardSave(state)",
        )
    return args


class StandardCheckpointHandler(_Handler):
    """Saves a tree of arrays."""

    save_args, restore_args = ocp.args.StandardSave, ocp.args.StandardRestore


class PyTreeCheckpointHandler(_Handler):
    """Saves a tree of arrays, and restores with arguments for each leaf."""

    save_args, restore_args = ocp.args.PyTreeSave, ocp.args.PyTreeRestore


class ArrayCheckpointHandler(_Handler):
    """Saves one array."""

    save_args, restore_args = ocp.args.ArraySave, ocp.args.ArrayRestore


class JsonCheckpointHandler(_Handler):
    """Saves a value of JSON."""

    save_args, restore_args = ocp.args.JsonSave, ocp.args.JsonRestore


class CompositeCheckpointHandler(_Handler):
    """Saves several items, with an argument for each by its name."""

    save_args = restore_args = ocp.args.Composite


def write(
    directory: str | PathLike[str],
    args: Any,
    *,
    wait: bool,
    force: bool = False,
    custom: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Save the items of the arguments as the checkpoint at a directory.

    Without `force`, a checkpoint that is there is a `CheckpointExistsError` at once.
    """
    if not force and items_at(path := str(location_text(directory))) is not None:
        raise CheckpointExistsError(
            "there is a committed checkpoint at this path already",
            path=path,
            remedy="save to another path, or pass force=True (v1: overwrite=True) to replace it safely",
        )
    return reknit.save(directory, saved_state(args, custom), wait=wait, overwrite=force, options=options)


def read(directory: str | PathLike[str], args: Any) -> Any:
    """Restore the items of the arguments from the checkpoint, or the item in it, that a directory names."""
    path, item = located(directory)
    with reknit.open(path) as checkpoint:
        if item == TREE and not isinstance(args, ocp.args.Composite):
            return restored_tree(path, args, checkpoint)
        return restored(path, args, checkpoint, item or None)


def described(checkpoint: Checkpoint, item: str | None = None) -> Any:
    """Return the contents of all items, or of the one item, with abstract arrays."""
    names = [name for name in checkpoint.items if name != CUSTOM]
    found = {
        name: kept_value(checkpoint, name) if is_kept(checkpoint, name) else contents(checkpoint, name)
        for name in names
        if item in (None, TREE, name)
    }
    if item == TREE:
        return found
    one = item or (DEFAULT if names == [DEFAULT] else None)
    if one is not None:
        require_item(checkpoint, one)
    return ocp.args.Composite(**found) if one is None else found[one]


def legacy_args(handlers: Any, items: Any, kwargs: Any, *, named: bool, saves: bool) -> Any:
    """Return arguments for the objects and keywords of Orbax's older calls, by the handler of each item."""
    names = dict(items or {}) if named else {DEFAULT: items}
    given = (kwargs or {}) if named else {DEFAULT: kwargs or {}}
    made = {}
    for name in names.keys() | given.keys():
        handler = handlers.get(name) if isinstance(handlers, dict) else handlers
        handler = getattr(handler, "handler", handler)
        kind = handler if isinstance(handler, _Handler) else PyTreeCheckpointHandler()
        made[name] = (kind.save_args if saves else kind.restore_args)(
            names.get(name), **(given.get(name) or {})
        )
    return ocp.args.Composite(**made) if named else made[DEFAULT]


class WaitingCheckpointer:
    """Saves and restores with a handler, and waits for each save.

    All processes make the same calls.  `options` are those of `reknit.save`; options of Orbax's own files
    have no effect.
    """

    waits = True

    def __init__(self, handler: Any, *_: Any, options: SaveOptions | None = None, **__: Any) -> None:
        self._handler, self._options = handler, options
        self._pending: list[PendingSave] = []

    @property
    def handler(self) -> Any:
        """The handler of the object."""
        return self._handler

    def save(
        self,
        directory: str | PathLike[str],
        *items: Any,
        force: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save an object; with `force`, replace a checkpoint by a safe switch.

        Raises `CheckpointExistsError` without `force`, and the errors of `reknit.save`.
        """
        self._pending = [pending for pending in self._pending if not pending.done() or pending.error]
        self._pending.append(
            write(
                directory,
                self._handler.as_save(*items, **kwargs),
                wait=self.waits,
                force=force,
                custom=custom_metadata,
                options=self._options,
            )
        )

    def restore(self, directory: str | PathLike[str], *items: Any, **kwargs: Any) -> Any:
        """Restore an object, after the saves that this checkpointer began.

        `directory` is a checkpoint, or the place ``ROOT/STEP/ITEM`` of an item in a step.
        """
        self.wait_until_finished()
        return read(directory, self._handler.as_restore(*items, **kwargs))

    def metadata(self, directory: str | PathLike[str]) -> Any:
        """Return the object with abstract arrays."""
        return self._handler.metadata(directory)

    def wait_until_finished(self) -> None:
        """Wait until all saves are committed.  Raises the error of a save that failed."""
        while self._pending:
            self._pending.pop(0).result()

    def check_for_errors(self) -> None:
        """Raise the error of a save that has failed by now."""
        for pending in self._pending:
            if pending.done():
                pending.result()

    def close(self) -> None:
        """Wait until all saves are committed."""
        self.wait_until_finished()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:  # otherwise agents finish the saves
            self.close()


class AsyncCheckpointer(WaitingCheckpointer):
    """Saves with a handler while training goes on."""

    waits = False


class PyTreeCheckpointer(WaitingCheckpointer):
    """Saves and restores trees, and waits for each save."""

    def __init__(self, *_: Any, options: SaveOptions | None = None, **__: Any) -> None:
        super().__init__(PyTreeCheckpointHandler(), options=options)


class StandardCheckpointer(AsyncCheckpointer):
    """Saves and restores trees while training goes on."""

    def __init__(self, *_: Any, options: SaveOptions | None = None, **__: Any) -> None:
        super().__init__(StandardCheckpointHandler(), options=options)

    def restore(
        self, directory: str | PathLike[str], target: Any = None, *, strict: bool = True, args: Any = None
    ) -> Any:
        """Restore a tree like the target, or as the checkpoint has it."""
        if args is None:
            args = self.handler.as_restore(target, strict=strict)
        return super().restore(directory, args=args)
