"""How does a strategy of Lightning save and load with reknit?  Its live objects, on all ranks at once.

A `CheckpointIO` saves on rank 0 only, and the methods of a strategy are called on every rank.  So these are
replaced.  Model and optimizers are saved and loaded where they are; the trainer's other state is one item.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing, contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reknit import stored
from reknit.api import loads
from reknit.engine.record.recognising import manifest_exists
from reknit.errors import CheckpointNotFoundError, UsageError
from reknit.frameworks.per_rank import PerRank, RngState
from reknit.frameworks.stateful import Accessors, Kept
from reknit.integrations.trainer_parts.positioned_loader import PositionedLoader, is_plain
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reknit.runs.checkpointer import Checkpointer

_TRAINER = "trainer"
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


class ReknitStrategy:
    """The methods of a strategy about checkpoints; `original` has those of Lightning."""

    original: Any
    model: Any
    optimizers: Any
    lightning_module: Any
    is_global_zero: bool
    broadcast: Any
    runs: Mapping[str, Checkpointer | None] = {}
    """The runs by their folders; they are open while the trainer trains."""
    _save: Callable[[dict[str, Any]], None] | None = None
    _restored = False
    _random: Any = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded when the optimizers exist."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the trainer loads the states of optimizers, if these are not loaded already."""
        return not self._restored and bool(self.original.lightning_restore_optimizer)

    @contextmanager
    def saving(self, save: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Let `Trainer.save_checkpoint` call `save` with the items of this rank."""
        self._save = save
        try:
            yield
        finally:
            self._save = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model, or nothing in a save of reknit, which reads the model itself."""
        return {} if self._save is not None else self.original.lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, or nothing in a save of reknit."""
        return {} if self._save is not None else self.original.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the live objects, and the rest of a checkpoint as rank 0 has it."""
        if self._save is None:
            self.original.save_checkpoint(checkpoint, filepath, storage_options)
            return
        state = self._objects(with_optimizers="optimizer_states" in checkpoint)
        state["rng"] = PerRank(RngState())
        elsewhere = ("state_dict", "optimizer_states")
        rest = {key: _plain(value) for key, value in checkpoint.items() if key not in elsewhere}
        if self.is_global_zero:
            state[_TRAINER] = Kept(rest)
        self._save(state)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load live objects in place, and return the rest; leave a file of Lightning to Lightning."""
        path = str(self.broadcast(checkpoint_path))
        self._restored = _is_ours(path, self.runs)
        if not self._restored:
            found: dict[str, Any] = self.original.load_checkpoint(path, *args, **kwargs)
            return found
        module = self.lightning_module
        rest = Kept()
        fits = module.trainer.state.fn == "fit"
        state: dict[str, Any] = {_TRAINER: rest, **self._objects(with_optimizers=fits)}
        if fits:
            state["rng"] = PerRank(Accessors(RngState().state_dict, self._keep_random))
        self._load(path, state, strict=module.strict_loading)
        version = _version_of(module.trainer)
        return dict(rest.values) or {_VERSION: version, "lr_schedulers": []}

    def _load(self, path: str, state: dict[str, Any], *, strict: bool) -> None:
        """Load a step, or the newest one if the path is the folder of a run."""
        for root, run in self.runs.items():
            if run is None and path == root:
                if (newest := self.broadcast(stored.latest(root))) is None:
                    raise CheckpointNotFoundError(f"there is no committed step below {root}")
                path = newest
            elif run is not None and path == root:
                run.resume(state)
                return
            elif run is not None and (
                found := [each.step for each in run.steps() if each.path == path and each.step is not None]
            ):
                run.load(state, found[0])
                return
        loads.load(path, state, strict=strict)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the model, unless that is done."""
        if not self._restored:
            self.original.load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers, unless that is done."""
        if not self._restored:
            self.original.load_optimizer_state_dict(checkpoint)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of the strategy; a plain one for training gets a position."""
        loader = self.original.process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        return PositionedLoader(loader, trainer) if trainer.training and is_plain(loader) else loader

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
                found[f"optimizer_{number}" if number else "optimizer"] = optimizer
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
