"""`training.Checkpointer` of Orbax v1, on top of `CheckpointManager`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
from orbax import checkpoint as ocp
from orbax.checkpoint.experimental.v1 import training as _orbax

from reknit.errors import UsageError, shown
from reknit.integrations.orbax.items import saved_state
from reknit.integrations.orbax.manager import CheckpointManager
from reknit.plugins.trainer import is_stateful
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from reknit import PendingSave
    from reknit.integrations.orbax.manager import StepFacts
    from reknit.options import SaveOptions
    from reknit.plugins.trainer import OtherRun


# mypy: disallow-untyped-calls=False


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


save_decision_policies = _orbax.save_decision_policies
preservation_policies = _orbax.preservation_policies


class RunCheckpointer:
    """Saves and loads the steps of a run, as Orbax's class ``training.Checkpointer`` does.

    All processes make one and make the same calls.  All else is as for `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        context: Any = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
        save_options: SaveOptions | None = None,
        other_run: OtherRun = "refuse",
    ) -> None:
        if context is not None:
            raise UsageError("a context of Orbax has no counterpart", remedy="pass save_options")
        self._manager = CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                save_decision_policy=save_decision_policy,
                preservation_policy=preservation_policy,
                step_name_format=step_name_format,
            ),
            metadata=custom_metadata,
            save_options=save_options,
            other_run=other_run,
        )

    @property
    def directory(self) -> Any:
        """The folder of the steps."""
        return self._manager.directory

    @property
    def checkpoints(self) -> Sequence[StepFacts]:
        """The steps, ascending, with their metrics and times."""
        return self._manager.facts()

    @property
    def latest(self) -> StepFacts | None:
        """The newest step, or None."""
        return self.checkpoints[-1] if self.checkpoints else None

    def should_save(self, step: int) -> bool:
        """Return whether the policy saves a step."""
        return self._manager.should_save(step)

    def save(self, step: int, state: Any, *, checkpointable_name: str = STATE, **kwargs: Any) -> bool:
        """Save a tree as a step if the policy demands it, and return whether it is saved."""
        return self.save_checkpointables(step, {checkpointable_name: state}, **kwargs)

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **kwargs: Any
    ) -> SaveResponse[bool] | None:
        """Save a tree while training goes on; return None if the policy does not demand it."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **kwargs)

    def save_checkpointables(self, step: int, checkpointables: Mapping[str, Any], **kwargs: Any) -> bool:
        """Save named objects as a step if the policy demands it, and return whether they are saved."""
        response = self.save_checkpointables_async(step, checkpointables, **kwargs)
        return response is not None and response.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveResponse[bool] | None:
        """Save named objects while training goes on; return None if the policy does not demand it.

        With `overwrite`, a step of this number is deleted before.
        """
        if overwrite and step in self._manager.all_steps():
            self._manager.delete(step)
        state = saved_state(save_args(checkpointables), custom_metadata)
        pending = self._manager.save_state(step, state, metrics, force)
        return None if pending is None else SaveResponse(pending, True)

    def load(
        self,
        step: int | StepFacts | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str = STATE,
    ) -> Any:
        """Load the tree of a step, by default of the newest."""
        return self.load_checkpointables(step, {checkpointable_name: abstract_state})[checkpointable_name]

    def load_checkpointables(
        self, step: int | StepFacts | None = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load named objects of a step, or all of them, by default of the newest step."""
        args = None if abstract_checkpointables is None else restore_args(abstract_checkpointables)
        return dict(self._manager.restore(_number(step), args=args).items())

    def metadata(self, step: int | StepFacts) -> Any:
        """Return the contents of a step with abstract arrays, its metrics, and the metadata of the user."""
        number = _number(step)
        assert number is not None
        return self._manager.metadata(number)

    def delete(self, step: int | StepFacts) -> None:
        """Remove a step."""
        number = _number(step)
        assert number is not None
        self._manager.delete(number)

    def reload(self) -> None:
        """Read the list of steps anew."""
        self._manager.reload()

    def is_saving_in_progress(self) -> bool:
        """Return whether a save goes on."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Wait until all saves are committed.  Raises the error of a save that failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for all saves.  Every process calls it."""
        self._manager.close()

    def __enter__(self) -> RunCheckpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._manager.__exit__(kind, error, traceback)


def _number(step: int | StepFacts | None) -> int | None:
    return step if step is None or isinstance(step, int) else step.step


Checkpointer = RunCheckpointer
