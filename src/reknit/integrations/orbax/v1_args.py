"""What is a checkpointable of Orbax v1?  An argument of the older calls, by its type."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
from orbax import checkpoint as ocp

from reknit.errors import UsageError, shown
from reknit.frameworks.stateful import is_stateful
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reknit.engine.outcome import PendingSave

STATE = "state"
"""The item of a checkpoint that has only one tree, as in Orbax v1."""

_PLAIN = (str, int, float, bool, type(None))
_Answer = TypeVar("_Answer")


class SaveResponse(Generic[_Answer]):
    """A save that goes on."""

    def __init__(self, pending: PendingSave, answer: _Answer) -> None:
        self._pending, self._answer = pending, answer

    def result(self, timeout: float | None = None) -> _Answer:
        """Wait for the commit.  Raises the error of the save, or `DeadlineError`."""
        self._pending.result(timeout)
        return self._answer

    def on_complete(self, callback: Callable[[_Answer], None]) -> None:
        """Call a function in a thread after the commit; not after a save that fails."""

        def follow() -> None:
            self._pending.wait()
            if self._pending.error is None:
                callback(self._answer)

        start_thread("reknit-callback", follow)


def save_args(checkpointables: Mapping[str, Any]) -> Any:
    """Return the arguments that save named objects.  Raises `UsageError` for one that writes files itself."""
    return ocp.args.Composite(**{name: _save(name, value) for name, value in checkpointables.items()})


def _save(name: str, value: Any) -> Any:
    own_files = callable(getattr(value, "save", None)) and callable(getattr(value, "load", None))
    if own_files and not is_stateful(value):
        raise UsageError(
            f"the checkpointable {name!r}, {shown(value)}, writes files of its own",
            remedy="give it state_dict and load_state_dict",
        )
    plain = all(isinstance(leaf, _PLAIN) for leaf in jax.tree.leaves(value))
    return ocp.args.JsonSave(value) if plain else ocp.args.StandardSave(value)


def restore_args(targets: Mapping[str, Any]) -> Any:
    """Return the arguments that load named objects; a target of None stands for the saved tree."""
    return ocp.args.Composite(**{name: restore_arg(target) for name, target in targets.items()})


def restore_arg(target: Any) -> Any:
    """Return the argument that loads one object; abstract arrays become arrays of JAX."""
    return None if target is None else ocp.args.StandardRestore(jax.tree.map(_of_jax, target))


def _of_jax(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is not None:
        return leaf
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here, weak_type=leaf.weak_type)
