"""How does a strategy of Lightning save and load with reknit?  Its live objects, on all ranks at once.

A `CheckpointIO` saves on rank 0 only, and the methods of a strategy are called on every rank.  So these are
replaced.  Model and optimizers are saved and loaded where they are; the trainer's other state is one item.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reknit.engine.record.recognising import manifest_exists
from reknit.errors import UsageError
from reknit.frameworks.per_rank import PerRank, RngState
from reknit.frameworks.stateful import Accessors, Kept
from reknit.integrations.trainer_parts.lightning_hooks import (
    OWN,
    ShownStates,
    add_groups,
    freeze_as_saved,
    groups_of,
    marked,
    marks,
    owners,
    require_whole,
    shown_as,
    trainable,
)
from reknit.integrations.trainer_parts.lightning_step import TRAINER, find, optimizer_name, sound
from reknit.integrations.trainer_parts.positioned_loader import (
    PositionedLoader,
    begin_next_epoch,
    is_plain,
)
from reknit.integrations.trainer_parts.private_hooks import private
from reknit.runs.load_step import say_resumed
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reknit.integrations.trainer_parts.lightning_step import FolderOfRun, StepOfRun

_VERSION = "pytorch-lightning_version"
_OF_A_CLASS = ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__")
_PACKAGES = ("lightning", "pytorch_lightning")
_NAMES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")


def adopt(strategy: Any) -> None:
    """Give a strategy of a trainer the methods of `ReknitStrategy`.  Raises `UsageError` for other kinds."""
    kind = type(strategy)
    if hasattr(kind, "runs"):
        return
    known = next((base for base in kind.__mro__ if base.__module__.partition(".")[0] in _PACKAGES), kind)
    if known.__name__ not in _NAMES:
        raise UsageError(
            f"reknit does not save a trainer with the strategy {kind.__name__}",
            remedy=f"use one of {', '.join(_NAMES)}",
        )
    strategy.__class__ = _adopted(kind)  # type: ignore[arg-type]


@cache
def _adopted(kind: type) -> type:
    """Return a class with one base, as Python gives no other class to an object that is there."""
    methods = {name: value for name, value in vars(ReknitStrategy).items() if name not in _OF_A_CLASS}
    made: type = type(f"Reknit{kind.__name__}", (kind,), methods)
    made.original = property(lambda self: super(made, self))  # type: ignore[attr-defined]
    return made


class _Nothing(dict[str, Any]):
    """The checkpoint of a run without steps: Lightning calls no hooks with it."""

    def __bool__(self) -> bool:
        return False


class ReknitStrategy:
    """The methods of a strategy about checkpoints; `original` has those of Lightning.

    Hooks are called in Lightning's order.  A strategy that loads before it is set up, as that of one device
    and DDP, calls them then.  Its objects are filled at the end of `setup`, when the optimizers are there.
    """

    original: Any
    model: Any
    optimizers: Any
    lightning_module: Any
    is_global_zero: bool
    broadcast: Any
    reduce_boolean_decision: Any
    restore_checkpoint_after_setup: bool
    runs: Mapping[str, FolderOfRun] = MappingProxyType({})
    """The folders of the runs, by their paths."""
    _save: Callable[[dict[str, Any]], None] | None = None
    _shown: ShownStates | None = None
    _step: StepOfRun | None = None
    _checkpoint: Mapping[str, Any] = MappingProxyType({})
    _fills = False
    _by_hooks = False
    _given: Any = None
    _marks: Any = None
    resumed_at: int | None = None
    """The number of the loaded step, until the training begins."""
    _random: Any = None

    @contextmanager
    def saving(self, save: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Let `Trainer.save_checkpoint` call `save` with the items of this rank."""
        self._save = save
        self._shown = ShownStates() if owners(self.lightning_module.trainer, "on_save_checkpoint") else None
        try:
            yield
        finally:
            self._save = self._shown = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model; a save of reknit reads the model itself, and only hooks want it."""
        if self._save is not None and self._shown is None:
            return {}
        flat = any(kind.__name__ == "FSDPStrategy" for kind in type(self).__mro__)
        if self._shown is None or flat:
            states: dict[str, Any] = self.original.lightning_module_state_dict()
        else:  # a strategy with parts of the model would copy them all
            states = self.lightning_module.state_dict()
        return states if self._shown is None else self._shown.model(states)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer; a save of reknit reads it itself, and only hooks want it."""
        if self._save is not None and self._shown is None:
            return {}
        gathers = self.restore_checkpoint_after_setup and self._shown is not None
        states: dict[str, Any] = (
            optimizer.state_dict() if gathers else self.original.optimizer_state(optimizer)
        )
        return states if self._shown is None else self._shown.optimizer(states)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the live objects, and the rest of a checkpoint as rank 0 has it."""
        if self._save is None:
            self.original.save_checkpoint(checkpoint, filepath, storage_options)
            return
        trainer = self.lightning_module.trainer
        rest = {key: _plain(value) for key, value in checkpoint.items()}
        model, optimizers = rest.pop("state_dict", {}), rest.pop("optimizer_states", None)
        edited, replaced = self._edits(model, optimizers)
        if replaced:
            rest["optimizer_states"] = optimizers
        require_whole(rest, trainer)
        rest[OWN] = trainable(trainer)
        if optimizers is not None and not replaced and not self.restore_checkpoint_after_setup:
            rest[OWN]["optimizers"] = groups_of(self.optimizers, self.lightning_module)
        state = self._objects(with_optimizers=optimizers is not None and not replaced)
        state["rng"] = PerRank(RngState())
        if self.is_global_zero:
            state[TRAINER] = Kept(rest)
        with shown_as(self.lightning_module, model) if edited else nullcontext():
            self._save(state)

    def _edits(self, model: Any, optimizers: Any) -> tuple[bool, bool]:
        """Return whether hooks have changed the states of the model, and those of the optimizers."""
        if self._shown is None:
            return False, False
        trained, sharded = set[str](), self.restore_checkpoint_after_setup
        if not sharded:
            groups = (group for each in self.optimizers for group in each.param_groups)
            ids = {id(one) for group in groups for one in group["params"]}
            trained = {name for name, one in self.lightning_module.named_parameters() if id(one) in ids}
        edits = self._shown.edits(model, optimizers, trained)
        names = ", ".join(owners(self.lightning_module.trainer, "on_save_checkpoint"))
        for edit in edits:
            everywhere = self.reduce_boolean_decision(edit, all=True)
            if not everywhere and not self.reduce_boolean_decision(not edit, all=True):
                raise UsageError(
                    f"the hook on_save_checkpoint of one of {names} changes the states on some ranks only",
                    remedy="change state_dict and optimizer_states on all ranks alike",
                )
        if edits[1] and sharded:
            raise UsageError(
                f"the hook on_save_checkpoint of one of {names} changes the states of optimizers, of which "
                f"each rank of a {self._kind} has a part only",
                remedy="leave optimizer_states as they are",
            )
        return edits

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the trainer, and fill its objects; leave a file of Lightning to Lightning."""
        path = str(self.broadcast(checkpoint_path))
        self._step, self._fills = None, False
        if not _is_ours(path, self.runs):
            found: dict[str, Any] = self.original.load_checkpoint(path, *args, **kwargs)
            return found
        trainer, optimizers = self.lightning_module.trainer, list[Any]()
        if (step := self._find(path)) is None:
            trainer.ckpt_path = None  # Lightning would log that it has loaded the folder
            return _Nothing({_VERSION: _version_of(trainer)})
        sharded = self.restore_checkpoint_after_setup
        self._by_hooks = not sharded and bool(owners(trainer, "on_load_checkpoint"))
        if self._by_hooks:
            step, (model, optimizers) = sound(step, self._states_of, self._find)
        if sharded:
            step = sound(step, self._fill, self._find)
        checkpoint = {_VERSION: _version_of(trainer), **step.rest}
        saved = checkpoint.pop(OWN, {})
        if self._by_hooks:
            checkpoint["state_dict"] = model
        self._given = None
        if self._fits and not sharded:
            freeze_as_saved(trainer, saved)
            # Without schedulers, Lightning says that these are weights alone.
            if "lr_schedulers" in checkpoint and "optimizer_states" not in checkpoint:
                checkpoint["optimizer_states"] = optimizers
                self._given = marked(optimizers)
            self.resumed_at = checkpoint.get("global_step")
        self._step, self._checkpoint, self._fills = step, checkpoint, not sharded
        return checkpoint

    def _states_of(self, step: StepOfRun) -> tuple[StepOfRun, tuple[dict[str, Any], list[Any]]]:
        """Return a step, and the states that hooks expect."""
        return step, step.states(step.rest.get(OWN, {}).get("optimizers", []) if self._fits else [])

    def setup(self, trainer: Any) -> None:
        """Set the strategy up, and fill the objects of the trainer if a step was found before."""
        self.original.setup(trainer)
        if self._fills and self._step is not None:
            self._fills = False
            sound(self._step, self._fill, partial(self._restore_again, trainer))

    def _restore_again(self, trainer: Any, path: str) -> StepOfRun:
        """Call the hooks of a load with another step."""
        connector = trainer._checkpoint_connector
        private("lightning", connector, "_restore_modules_and_callbacks")(path)
        assert self._step is not None
        self._fills = False
        return self._step

    def _find(self, path: str) -> StepOfRun | None:
        return find(path, self.runs, self.broadcast, fits=self._fits)

    @property
    def _fits(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == "fit")

    @property
    def _kind(self) -> str:
        return type(self).__name__.removeprefix("Reknit")

    def _fill(self, step: StepOfRun) -> StepOfRun:
        """Fill the model, the optimizers, and the random generators; return the step."""
        module, sharded = self.lightning_module, self.restore_checkpoint_after_setup
        trainer, state = module.trainer, dict[str, Any]()
        objects = self._objects(with_optimizers=False)
        if self._fits:
            if sharded:
                freeze_as_saved(trainer, step.rest.get(OWN, {}))
            add_groups(trainer, step.rest.get("callbacks", {}) if sharded else None)
            objects = self._objects(with_optimizers=sharded or self._has_own(self._checkpoint))
            state["rng"] = PerRank(Accessors(RngState().state_dict, self._keep_random))
        if not self._by_hooks:
            state |= objects
        if state:
            report = step.load(state, lenient=not module.strict_loading)
            if self.is_global_zero:
                did = "resumed from" if self._fits else "loaded the model of"
                say_resumed(report, trainer.world_size, did=did)
            for folder in self.runs.values():
                folder.note(report)
        if self._by_hooks and len(objects) > 1:
            step.load_optimizers(objects)
        self._marks = marks(self.optimizers)
        return step

    def _has_own(self, checkpoint: Mapping[str, Any]) -> bool:
        """Return whether hooks have left the states of optimizers as they were saved."""
        return self._given is not None and marked(checkpoint.get("optimizer_states")) == self._given

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the model, unless it is filled in another way."""
        if self._step is None or self._by_hooks:
            self.original.load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers, unless they are filled already, and nobody has changed them since."""
        if self._step is None or not self._has_own(checkpoint):
            self.original.load_optimizer_state_dict(checkpoint)
        elif self._marks != marks(self.optimizers):
            self._step.load_optimizers(self._objects(with_optimizers=True))

    def goes_on_in(self, root: str) -> bool:
        """Return whether the trainer goes on from a step of the run with this folder."""
        return self._step is not None and self._step.run is self.runs[root].run

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of the strategy; a plain one for training gets a position."""
        loader = self.original.process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return loader
        loader = PositionedLoader(loader, trainer) if is_plain(loader) else loader
        begin_next_epoch(trainer, loader)
        return loader

    def restore_random(self) -> None:
        """Set the random generators as they were saved, once; loaders that begin have used them since."""
        if self._random is not None:
            RngState().load_state_dict(self._random)
            self._random = None

    def _keep_random(self, state: Any) -> None:
        self._random = state

    def _objects(self, *, with_optimizers: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model or self.lightning_module}
        if with_optimizers:
            for number, optimizer in enumerate(self.optimizers):
                found[optimizer_name(number)] = optimizer
        return found


def _plain(value: Any) -> Any:
    """Return a container of OmegaConf, as Hydra and NeMo have hyperparameters, as plain dicts and lists."""
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None:
        return value
    if isinstance(value, type) and issubclass(value, omegaconf.Container):
        return f"{value.__module__}.{value.__qualname__}"
    return omegaconf.OmegaConf.to_container(value) if omegaconf.OmegaConf.is_config(value) else value


def _is_ours(path: str, runs: Mapping[str, Any]) -> bool:
    if path in runs:
        return True
    if os.path.isfile(path):
        return False
    with closing(open_storage(path)) as storage:
        return manifest_exists(storage)


def _version_of(trainer: Any) -> str:
    """Return the version of the package of a trainer, which it requires of a checkpoint."""
    kind = next(base for base in type(trainer).__mro__ if base.__module__.endswith("trainer.trainer"))
    return str(import_module(kind.__module__.removesuffix(".trainer.trainer")).__version__)
