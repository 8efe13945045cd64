"""The state of a Trainer of transformers: objects, progress, adapters of PEFT, and the steps that stay."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from reknit import PerRank
from reknit.errors import CheckpointExistsError, MismatchError, UsageError, shown
from reknit.locations import location_text
from reknit.plugins.trainer import KeepPolicy, below, step_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from reknit import SavedStep
    from reknit.errors import ReknitError


Bases = dict[str, dict[str, Any]]
"""The base of each adapter, by the name of the adapter."""


def has_adapters(model: Any) -> bool:
    """Return whether a model is one of PEFT, or has adapters of PEFT."""
    return bool(getattr(model, "peft_config", None))


def adapters(model: Any) -> nn.Module:
    """Return a module with the adapters of a PEFT model, and with all else in it that is trained.

    It shares its tensors with the model, and they have their names in the model.
    """
    found, known = nn.Module(), set(model.peft_config)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        *path, last = name.split(".")
        if not tensor.requires_grad and known.isdisjoint((*path, last)):
            continue
        place = found
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            place.register_parameter(last, tensor)
        else:
            place.register_buffer(last, tensor)
    return found


def bases(model: Any) -> Bases:
    """Return the names and revisions of the frozen models to which the adapters of a model belong."""
    own = getattr(getattr(model, "config", None), "_name_or_path", None)
    return {
        name: {
            "base": getattr(config, "base_model_name_or_path", None) or own or None,
            "revision": getattr(config, "revision", None),
        }
        for name, config in model.peft_config.items()
    }


def require_bases(saved: Mapping[str, Any] | None, model: Any) -> None:
    """Raise `MismatchError` if saved adapters belong to another base than those of a model."""
    here = bases(model) if has_adapters(model) else None
    if saved != here:
        raise MismatchError(
            f"the checkpoint has adapters of {shown(saved)}, and this model has {shown(here)}",
            remedy="train with the base of the checkpoint; if only its name differs, set "
            "`model.peft_config[adapter].base_model_name_or_path` to the name in the checkpoint",
        )


@dataclass(frozen=True, slots=True)
class StepLimit(KeepPolicy):
    """Keep `count` steps: the newest, and the best by `metric`; with a `count` of 1 these may be two.

    Of equal steps the first is the best, as in trainers that replace the best step only by a better one.
    """

    count: int
    metric: str | None = None
    greater_is_better: bool = False

    reads_metrics = True

    @classmethod
    def of(cls, args: Any) -> StepLimit | None:
        """Return the policy that the arguments of a Trainer of transformers describe, or None."""
        limit, metric = args.save_total_limit, args.metric_for_best_model
        if limit is None or limit <= 0:
            return None
        name = None if metric is None else f"eval_{metric.removeprefix('eval_')}"
        return cls(limit, name, greater_is_better=bool(args.greater_is_better))

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        """Return the numbers of the steps to keep."""
        numbers = sorted({number for each in steps if (number := each.step) is not None})
        newest = numbers[-self.count :]
        best = self._best(steps)
        if best is None or best in newest:
            return set(newest)
        return {best, *numbers[-max(1, self.count - 1) :]}

    def _best(self, steps: Sequence[SavedStep]) -> int | None:
        sign = -1.0 if self.greater_is_better else 1.0
        scores = {
            each.step: sign * score
            for each in steps
            if each.step is not None and (score := (each.metrics or {}).get(self.metric or "")) is not None
        }
        return min(scores, key=lambda number: (scores.get(number, inf), number), default=None)


_OWN_ITEMS = {"model", "optimizer", "scheduler", "scaler", "rng", "trainer"}
_NATIVE = re.compile(r"checkpoint-([0-9]{1,18})")

PROGRESS = "trainer_state.json"
"""The file in which transformers expects the progress of a trainer."""


def run_arguments(given: Mapping[str, Any], root: str, keep: Any) -> tuple[dict[str, Any], str, bool]:
    """Return the arguments of a `Checkpointer`, its root, and whether a policy decides about saves.

    `root` and `keep` are used if the user has `given` neither these nor tiers.
    """
    if given.get("tiers") is None:
        found = {"root": root, "keep": keep, **given}
        return found, location_text(found["root"]), given.get("save") is not None
    first = given["tiers"][0]
    return dict(given), location_text(first.root), first.every is not None


def unwrapped(trainer: Any) -> Any:
    """Return the model of a trainer without DDP or compilation."""
    return trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)


def model_of(trainer: Any) -> Any:
    """Return the part of the model that a step has: the adapters of a PEFT model, else all of it."""
    model = unwrapped(trainer)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    # FSDP1 has the adapters in flat parameters of its wrappers.
    flat = plugin is not None and getattr(plugin, "fsdp_version", 1) == 1
    if has_adapters(model) and not flat:
        return adapters(model)
    return trainer.model_wrapped


def objects_of(trainer: Any, rng: Any) -> dict[str, Any]:
    """Return the objects that a step has; `rng` stands for the random generators."""
    state = {"model": model_of(trainer), **trainer._reknit_items}
    if not trainer.args.save_only_model:
        state |= {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "rng": PerRank(rng)}
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
    return state


def check_items(items: Mapping[str, Any] | None) -> None:
    """Raise `UsageError` for items with the name of one of the trainer's own."""
    if taken := sorted(set(items or ()) & _OWN_ITEMS):
        raise UsageError(f"the items {taken} are the trainer's own", remedy="give yours other names")


def progress_of(trainer: Any, exportable: Any) -> dict[str, Any]:
    """Return the progress of a trainer with its `exportable` callbacks, and the bases of its adapters."""
    callbacks: dict[str, Any] = {}
    for each in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(each, exportable):
            callbacks.setdefault(type(each).__name__, []).append(each.state())
    trainer.state.stateful_callbacks = {
        name: states if len(states) > 1 else states[0] for name, states in callbacks.items()
    }
    model = unwrapped(trainer)
    adapters = bases(model) if has_adapters(model) else None
    return {"state": json.loads(json.dumps(asdict(trainer.state))), "adapters": adapters}


def write_progress(saved: Mapping[str, Any], folder: str) -> None:
    """Write a saved progress into a folder, from which transformers counts the samples to skip."""
    # The best step follows with the weights: transformers drops one that is not a local folder.
    state = {**saved["state"], "best_model_checkpoint": None}
    Path(folder, PROGRESS).write_text(json.dumps(state), encoding="utf-8")


def is_native(place: Any) -> bool:
    """Return whether a place is a checkpoint that transformers itself has written."""
    return isinstance(place, (str, os.PathLike)) and os.path.isfile(os.path.join(place, PROGRESS))


def step_of(native: str) -> int:
    """Return the step of a checkpoint of transformers."""
    return int(json.loads(Path(native, PROGRESS).read_text(encoding="utf-8"))["global_step"])


def newest_native(folder: str, run: Any = None) -> tuple[int, str] | None:
    """Return the number and the path of the newest checkpoint that transformers has finished in a folder.

    Raises `UsageError` if there are only unfinished ones, for a `run` that has no step either.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    numbers = sorted(int(match[1]) for name in names if (match := _NATIVE.fullmatch(name)))
    found = [(number, os.path.join(folder, f"checkpoint-{number}")) for number in numbers]
    whole = [each for each in found if is_native(each[1])]
    if found and not whole and run is not None and run.latest() is None:
        raise UsageError(
            f"{found[-1][1]} is a checkpoint of transformers without {PROGRESS}: its save did not finish",
            remedy="remove it, and train again; or pass another output_dir",
            path=found[-1][1],
        )
    return whole[-1] if whole else None


def refuse_later(run: Any, root: str, after: int, *, replaces: bool) -> None:
    """Raise `CheckpointExistsError` if a run has steps, but is to go on after an earlier step, or anew."""
    later = [each.step for each in run.steps() if each.step is not None and each.step > after]
    if later and not replaces:
        raise CheckpointExistsError(
            f"{root} has step {later[-1]} of an earlier run, and this training would begin with step {after}",
            path=root,
            remedy="train(resume_from_checkpoint=True) goes on after that step; to begin before it, pass "
            "another output_dir, or checkpoints={'later_steps': 'move'}, which puts those steps aside",
        )


def refuse_native(native: tuple[int, str] | None) -> None:
    """Raise `CheckpointExistsError` if a training would begin anew beside checkpoints of transformers."""
    if native is not None:
        raise CheckpointExistsError(
            f"{native[1]} is a checkpoint of transformers, and this training would begin with step 0",
            path=native[1],
            remedy="train(resume_from_checkpoint=True) goes on after it; train(resume_from_checkpoint=False) "
            "begins with step 0 beside it; or pass another output_dir",
        )


def number_at(place: Any, root: str) -> int | None:
    """Return the number of a step by its path, or None if it is not a step below `root`."""
    text = location_text(place).rstrip("/")
    digits = text.partition("?")[0].rpartition("step_")[2]
    if not digits.isdecimal() or text != below(root, step_name(int(digits))):
        return None
    return int(digits)


def newest_before(number: int, steps: Sequence[SavedStep]) -> int | None:
    """Return the number of the newest step before another, or None."""
    return max((each.step for each in steps if each.step is not None and each.step < number), default=None)


def moved(best: str | None, root: str) -> str | None:
    """Return the path of the best step, as a run had recorded it, below the root that this run has."""
    return None if best is None else below(root, best.partition("?")[0].rstrip("/").rpartition("/")[2])


class UnsoundStep(Exception):
    """The step from which a trainer wanted to resume is damaged, or lacks items."""

    def __init__(self, error: ReknitError) -> None:
        super().__init__(str(error))
        self.error = error
