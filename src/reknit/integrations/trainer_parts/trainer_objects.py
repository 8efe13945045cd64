"""What is the state of a Trainer of transformers?  Its objects, its progress, and where it may resume."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reknit.engine.stored.steps import step_name
from reknit.errors import CheckpointExistsError, UsageError
from reknit.frameworks.per_rank import PerRank
from reknit.integrations.trainer_parts import peft_adapters
from reknit.locations import location_text
from reknit.runs.tiers import below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.errors import ReknitError
    from reknit.types.saved_step import SavedStep

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
    if peft_adapters.has_adapters(model) and not flat:
        return peft_adapters.adapters(model)
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
    adapters = peft_adapters.bases(model) if peft_adapters.has_adapters(model) else None
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
