"""The hooks of a Lightning trainer that change its checkpoints, and the order in which it needs them."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import UsageError
from reknit.plugins.framework import is_dtensor, without_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OWN = "reknit"
"""The entry of a saved trainer that Lightning does not have; hooks do not see it."""

_BASES = (".callbacks.callback", ".core.hooks")
"""Modules of Lightning whose hooks do nothing."""
_AT_EPOCH_START = ("StochasticWeightAveraging", "GradientAccumulationScheduler")
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")


def owners(trainer: Any, hook: str) -> list[str]:
    """Return the classes of the callbacks, the module and the precision that have a hook of their own."""
    objects = [*trainer.callbacks, trainer.lightning_module, trainer.precision_plugin]
    return [type(one).__name__ for one in objects if _is_own(getattr(one, hook, None))]


def _is_own(method: Any) -> bool:
    return callable(method) and not str(getattr(method, "__module__", "")).endswith(_BASES)


def is_a(callback: Any, *names: str) -> bool:
    """Return whether a callback is of one of these classes of Lightning."""
    kinds = (kind for kind in type(callback).__mro__ if ".callbacks." in kind.__module__)
    return any(kind.__name__ in names for kind in kinds)


def copied(value: Any) -> Any:
    """Return a copy of all containers in a value, with the very same contents."""
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, (list, tuple)) else value


def same(value: Any, before: Any) -> bool:
    """Return whether a value has the contents that `copied` has kept."""
    if isinstance(before, dict):
        same_keys = isinstance(value, dict) and list(value) == list(before)
        return same_keys and all(same(value[key], before[key]) for key in before)
    if isinstance(before, list):
        alike = isinstance(value, (list, tuple)) and len(value) == len(before)
        return alike and all(map(same, value, before))
    plain = isinstance(before, (bool, int, float, str))
    return value is before or (plain and type(value) is type(before) and value == before)


def require_whole(rest: Mapping[str, Any], trainer: Any) -> None:
    """Raise `UsageError` if hooks have put tensors into a checkpoint of which each rank has a part only."""
    if found := [str(key) for key, value in rest.items() if any(map(is_dtensor, _leaves(value)))]:
        raise UsageError(
            f"the hook on_save_checkpoint of one of {', '.join(owners(trainer, 'on_save_checkpoint'))} puts "
            f"tensors into {', '.join(found)} of which each rank has a part only",
            remedy="put their full_tensor() there, or leave them out: the model is saved in any case",
        )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def refuse_averages(trainer: Any) -> None:
    """Raise `UsageError` for averages of weights of which each rank has a part."""
    if found := [type(one).__name__ for one in trainer.callbacks if is_a(one, *_AVERAGES)]:
        raise UsageError(
            f"{found[0]} cannot resume with {type(trainer.strategy).__name__.removeprefix('Reknit')}: "
            "Lightning gives no weights to its hook",
            remedy="use DDPStrategy or one device, or average the weights in the LightningModule itself",
        )


def trainable(trainer: Any) -> dict[str, Any]:
    """Return the parts of the module that a callback for finetuning has frozen or not; empty without one."""
    if not any(is_a(one, "BaseFinetuning") for one in trainer.callbacks):
        return {}
    module = trainer.lightning_module
    return {
        "trained": [name for name, one in module.named_parameters() if one.requires_grad],
        "tracking": [name for name, one in _norms(module) if one.track_running_stats],
    }


def freeze_as_saved(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Freeze and unfreeze the parts of the module as they were; Lightning's own checkpoints lack that."""
    if not saved or not any(is_a(one, "BaseFinetuning") for one in trainer.callbacks):
        return
    module, trained, tracking = trainer.lightning_module, set(saved["trained"]), set(saved["tracking"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    for name, norm in _norms(module):
        norm.track_running_stats = name in tracking


def _norms(module: Any) -> Iterator[tuple[str, Any]]:
    named = module.named_modules()
    return ((name, one) for name, one in named if getattr(one, "track_running_stats", None) is not None)


def add_groups(trainer: Any, states: Mapping[str, Any] | None) -> None:
    """Let callbacks for finetuning add the groups of parameters that they had added to the optimizers.

    Lightning calls them when the training begins, and the optimizers are loaded before.  `states` are those
    of the callbacks, None if these have them.
    """
    for callback in trainer.callbacks:
        if is_a(callback, "BaseFinetuning"):
            if states is not None and (state := states.get(callback.state_key)):
                callback.load_state_dict(deepcopy(state))
            base = next(kind for kind in type(callback).__mro__ if kind.__name__ == "BaseFinetuning")
            base.on_fit_start(callback, trainer, trainer.lightning_module)  # type: ignore[attr-defined]


def begin_epoch(trainer: Any) -> None:
    """Call hooks that Lightning leaves out if it resumes inside of an epoch.

    These callbacks set there a scheduler, or the number of batches of a step, which no checkpoint has, and a
    second call in an epoch does nothing else.
    """
    if trainer.fit_loop.restarted_mid_epoch:
        for callback in trainer.callbacks:
            if is_a(callback, *_AT_EPOCH_START):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)


def groups_of(optimizers: Any, module: Any) -> list[Any]:
    """Return the groups of optimizers in the order of their parameters, with the names of these.

    None in the place of an optimizer with parameters of another module.
    """
    names = {id(one): without_wrappers(name) for name, one in module.named_parameters()}
    found: list[Any] = []
    for optimizer in optimizers:
        order = [id(one) for group in optimizer.param_groups for one in group["params"]]
        if not names.keys() >= set(order):
            found.append(None)
            continue
        number = {one: place for place, one in enumerate(order)}
        groups = [
            {**group, "params": [number[id(one)] for one in group["params"]]}
            for group in optimizer.param_groups
        ]
        found.append({"names": [names[one] for one in order], "param_groups": groups})
    return found


def marks(optimizers: Any) -> list[Any]:
    """Return facts about optimizers that differ once somebody changes their groups or states."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.append({key: list(map(id, one)) if key == "params" else one for key, one in group.items()})
        found += [leaf for states in optimizer.state.values() for leaf in _leaves(states)]
    return marked(found)  # type: ignore[no-any-return]


def marked(value: Any) -> Any:
    """Return a value with facts in the place of each tensor, which differ once somebody changes it."""
    if isinstance(value, dict):
        return {key: marked(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(marked, value))
    return ("tensor", id(value), value._version) if isinstance(value, torch.Tensor) else value


class ShownStates:
    """The states that hooks of a save receive, to find the changes that they make."""

    def __init__(self) -> None:
        self._model: Any = {}
        self._optimizers: list[Any] = []

    def model(self, states: dict[str, Any]) -> dict[str, Any]:
        """Show the states of the model."""
        self._model = copied(states)
        return states

    def optimizer(self, states: dict[str, Any]) -> dict[str, Any]:
        """Show the states of the next optimizer."""
        self._optimizers.append(copied(states))
        return states

    def edits(self, model: Any, optimizers: Any, trained: set[str]) -> tuple[bool, bool]:
        """Return whether hooks have changed the states of the model, and those of the optimizers.

        States of optimizers are saved by the names of `trained` parameters.  If the model is saved without
        some of these names, the optimizers are saved as Lightning has them.
        """
        edited = not same(model, self._model)
        if optimizers is None:
            return edited, False
        named = not edited or trained <= set(model)
        return edited, not (named and same(optimizers, self._optimizers))


@contextmanager
def shown_as(module: Any, states: Mapping[str, Any]) -> Iterator[None]:
    """Let a module show other states than its own."""

    def replace(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            del state[key]
        state.update({f"{prefix}{key}": value for key, value in states.items()})

    shown = module.register_state_dict_post_hook(replace)
    try:
        yield
    finally:
        shown.remove()
