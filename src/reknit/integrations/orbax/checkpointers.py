"""How does a script save one checkpoint at a path of its own?  Orbax's checkpointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.integrations.orbax.handlers import (
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
    read,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from reknit.engine.outcome import PendingSave
    from reknit.options import SaveOptions


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
