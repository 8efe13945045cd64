"""The strategy of Lightning with its saves and loads replaced, and the position of its training loader.

A `CheckpointIO` saves on rank 0 only, and the methods of a strategy are called on every rank.  So these are
replaced.  Model and optimizers are saved and loaded where they are; the trainer's other state is one item.

Lightning itself begins a plain `DataLoader` anew after a resume inside of an epoch.  This loader stands
around it, and has the state that Lightning's loops save and load.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from reknit import PerRank, RngState
from reknit.errors import StateError, UsageError
from reknit.integrations import loaders
from reknit.integrations.lightning.hooks import (
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
from reknit.integrations.lightning.step import TRAINER, find, optimizer_name, sound
from reknit.integrations.private_hooks import private
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import Accessors, Kept, manifest_exists, say_resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reknit.integrations.lightning.step import FolderOfRun, StepOfRun


def is_plain(loader: Any) -> bool:
    """Return whether a loader is one of torch without a state of its own."""
    return isinstance(loader, DataLoader) and not hasattr(loader, "state_dict")


def begin_next_epoch(trainer: Any, loader: Any) -> None:
    """Let a trainer that resumes after the end of an epoch begin the next, with its training loader.

    Lightning leaves out the states of loaders then.  With `max_steps`, it trains one more batch of the ended
    epoch, too.
    """
    loop, current = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    is_loaded = private("lightning", loop, "_loaded_from_state_dict")
    if not is_loaded or not current.ready == current.started == current.processed:
        return
    base = next(kind for kind in type(loop).__mro__ if kind.__name__ == "_Loop")
    base.restarting.fset(loop, False)  # type: ignore[attr-defined]
    states = private("lightning", loop, "_combined_loader_states_to_load")
    if not states or not callable(getattr(loader, "load_state_dict", None)):
        return
    loader.load_state_dict(states.pop(0))
    if any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__):
        # torchdata's has given all batches, and ends when it is asked for one more.  Its next epoch draws.
        next(iter(loader), None)
        trainer.strategy.restore_random()


class PositionedLoader:
    """A plain loader of one rank, with its position in the epoch as the trainer's loop counts it."""

    _own = frozenset({"_loader", "_trainer", "_order", "_skipped", "_next_order"})

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader, self._trainer = loader, trainer
        self._order: bytes | None = None
        self._skipped = 0
        self._next_order: bytes | None = None
        loaders.give_generators(loader)

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # only before `__init__` has ended
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loaders.set_order(self._loader, self._next_order)
        self._order, self._next_order = loaders.order_of(self._loader), None
        skipped, self._skipped = self._skipped, 0
        return loaders.batches_after(self._loader, skipped) if skipped else iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches and samples that were taken, and the order of the rest."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        ended = progress.is_last_batch
        size = self._samples_of_a_step()
        taken = 0 if ended else progress.current.ready
        return {
            "batches": taken,
            "samples": None if size is None else taken * size,
            "epoch": self._trainer.fit_loop.epoch_progress.current.processed,
            "order": loaders.order_of(self._loader) if ended else self._order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; also set the loop's count of batches, which differs with the ranks.

        Raises `StateError` if the position is inside of a batch of all ranks.
        """
        taken, size = state["batches"], self._samples_of_a_step()
        if state["samples"] is not None and size is not None:
            taken, rest = divmod(state["samples"], size)
            if rest:
                raise StateError(
                    f"the position after {state['samples']} samples is inside of a batch: the ranks now take "
                    f"{size} samples at once",
                    remedy="choose a batch size for which the samples of a step divide the position",
                )
        if taken:
            current = self._trainer.fit_loop.epoch_loop.batch_progress.current
            more = taken - current.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(current, name, getattr(current, name) + more)
        if callable(set_epoch := getattr(loaders.sampler_of(self._loader), "set_epoch", None)):
            set_epoch(state["epoch"])
        self._skipped, self._next_order = taken, state["order"]

    def _samples_of_a_step(self) -> int | None:
        size = loaders.batch_size(self._loader)
        # A strategy of one device has none.
        replicas = getattr(self._trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return None if size is None else size * int(replicas.get("num_replicas", 1))


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
