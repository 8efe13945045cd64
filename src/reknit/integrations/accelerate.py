"""The calls of Accelerate that save and load, with all objects that a script has prepared.

In the place of `Accelerator.save_state` and `Accelerator.load_state`: models, optimizers, schedulers, the
scaler, loaders, registered objects, random generators, and the files of hooks.  A checkpoint loads on any
number of processes.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import reknit
from reknit.errors import FormatError, MissingExtraError, StateError, UsageError
from reknit.integrations.private_hooks import private
from reknit.options import CommOptions, SaveOptions
from reknit.plugins.trainer import Accessors, Kept, acting, ask_root, say_resumed

try:
    from accelerate.utils import DistributedType
except ImportError as error:
    raise MissingExtraError(
        "reknit.integrations.accelerate needs the package accelerate",
        remedy="pip install 'reknit[accelerate]'",
    ) from error

from reknit.integrations.loaders import CountedLoader, LoaderRngState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    from accelerate import Accelerator

    from reknit import Checkpointer, LoadReport, PendingSave
    from reknit.options import LoadOptions

_FILES = "hook_files"
_LOADERS = "loaders"
_KINDS = {
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "custom": "_custom_objects",
}
_ELSEWHERE = {
    DistributedType.DEEPSPEED: "reknit.integrations.deepspeed, with the prepared model",
    DistributedType.MEGATRON_LM: "reknit.integrations.megatron",
}


def state(accelerator: Accelerator, items: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the live objects of an accelerator as a state for `reknit.save`, and follow its loaders.

    Call it (or `load_state`, `resume`) before the loop, so that the batches of loaders are counted.  `items`
    are more items of the state.  It has no part of hooks, which `save_state` and `save` call.
    """
    return _state(accelerator, private("accelerate", accelerator, "_models"), items)


def save_state(
    accelerator: Accelerator,
    path: str | PathLike[str],
    *,
    step: int | None = None,
    items: Mapping[str, Any] | None = None,
    wait: bool = True,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> PendingSave:
    """Save all that an accelerator has prepared or registered.  Every process calls it, with the same `path`.

    Hooks of `register_save_state_pre_hook` receive a folder, whose files become a part of the checkpoint.
    All else is as for `reknit.save`, and so are the errors.  Raises `StateError` between two steps of
    gradient accumulation, and for a loader in an epoch that was begun before its batches were counted.
    """
    everything = _to_save(accelerator, items)
    return reknit.save(
        path, everything, step=step, wait=wait, overwrite=overwrite, options=options, metadata=metadata
    )


def load_state(
    accelerator: Accelerator,
    path: str | PathLike[str],
    *,
    items: Mapping[str, Any] | None = None,
    strict: bool | Sequence[str] = True,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Load a checkpoint of `save_state` into the prepared and registered objects, in place.

    Hooks of `register_load_state_pre_hook` receive a folder with the files of the save.  Random generators
    are loaded on the same number of processes only, as the report states.  All else is as for `reknit.load`.
    """
    files = Kept()
    if _hooks(accelerator):
        reknit.load(path, {_FILES: files}, options=options)
    models = _after_hooks(accelerator, files.values)
    report = reknit.load(path, _state(accelerator, models, items), strict=strict, options=options)
    if accelerator.is_main_process:
        say_resumed(report, accelerator.num_processes)
    return report


def save(
    accelerator: Accelerator,
    checkpointer: Checkpointer,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    items: Mapping[str, Any] | None = None,
    force: bool = False,
) -> PendingSave | None:
    """Save a step of a run if its policy or `force` demands that, as `Checkpointer.save` does."""
    if not (checkpointer.should_save(step) or force):
        return None
    return checkpointer.save(step, _to_save(accelerator, items), metrics, force=force)


def resume(
    accelerator: Accelerator,
    checkpointer: Checkpointer,
    *,
    items: Mapping[str, Any] | None = None,
    start: Literal[0] | None = None,
) -> int:
    """Load the newest complete step of a run, and return the next step, as `Checkpointer.resume` does.

    Call it after `prepare` and before the loop, also in a run that begins.  The log has one line about the
    load, and `Checkpointer.report` is its report.  A run without steps is refused with `UsageError` beside
    folders of `Accelerator.save_state`; ``start=0`` begins with step 0 beside them.
    """
    if start is None:
        group, refuse = acting(None, CommOptions()).group, partial(_refuse_own, checkpointer)
        ask_root(group, "begin", SaveOptions().timeout_s, refuse)
    files = Kept()
    if _hooks(accelerator) and not checkpointer._resume({_FILES: files}, start):
        return checkpointer.resume(state(accelerator, items), start=start)
    everything = _state(accelerator, _after_hooks(accelerator, files.values), items)
    return checkpointer.resume(everything, start=start)


def _refuse_own(checkpointer: Checkpointer) -> None:
    """Raise `UsageError` for a run without steps, but with folders of `Accelerator.save_state`.

    These may also be below ``checkpoints``.
    """
    if checkpointer.latest() is not None:
        return
    root = checkpointer.root
    for folder in (Path(root), Path(root, "checkpoints")):
        if found := [each.parent for each in folder.glob("*/random_states_0.pkl")]:
            newest = max(found, key=lambda each: each.stat().st_mtime)
            raise UsageError(
                f"there is no step of this run below {root}, but {newest} is a folder of "
                "Accelerator.save_state",
                remedy=f"to go on from it: accelerator.load_state({str(newest)!r}), then "
                "resume(accelerator, checkpointer, start=0); the second call alone begins anew beside it",
                path=str(newest),
            )


def _state(accelerator: Accelerator, models: list[Any], items: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the live objects, with these models: the others were taken by hooks."""
    if (other := _ELSEWHERE.get(accelerator.distributed_type)) is not None:
        raise UsageError(
            f"{accelerator.distributed_type.value} keeps the state of an accelerator in an engine of its own",
            remedy=f"use {other}",
        )
    positions = _followed(accelerator)
    found: dict[str, Any] = {"rng": LoaderRngState(positions)}
    for kind, attribute in _KINDS.items():
        for number, value in enumerate(private("accelerate", accelerator, attribute)):
            if kind != "model" or any(value is model for model in models):
                found[f"{kind}_{number}" if number else kind] = value
            else:
                _name_parameters(value, accelerator)
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    found["progress"] = Accessors(
        lambda: {"step": accelerator.step}, lambda saved: setattr(accelerator, "step", saved["step"])
    )
    if positions:
        found[_LOADERS] = positions
    if taken := sorted(set(items or ()) & {*found, _FILES}):
        raise UsageError(f"the items {taken} are the accelerator's own", remedy="give yours other names")
    return found | dict(items or {})


def _to_save(accelerator: Accelerator, items: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state to save, after the hooks."""
    if not accelerator.sync_gradients:
        raise StateError(
            "the accelerator is between two steps of gradient accumulation, and gradients are not saved",
            remedy="save where accelerator.sync_gradients is true",
        )
    models = list(private("accelerate", accelerator, "_models"))
    hooks = private("accelerate", accelerator, "_save_model_state_pre_hook")
    files: dict[str, Any] = {}
    if hooks:
        # As in Accelerate, where FSDP saves its models before the hooks.
        is_sharded = accelerator.distributed_type == DistributedType.FSDP
        weights = [] if is_sharded else [model.state_dict() for model in models]
        of = {id(each): model for each, model in zip(weights, models, strict=not is_sharded)}
        with tempfile.TemporaryDirectory(prefix="reknit-hooks-") as folder:
            for hook in hooks.values():
                hook(models, weights, folder)
            files = dict(_files_in(Path(folder)))
        if not is_sharded:
            models = [of[id(each)] for each in weights]
    found = _state(accelerator, models, items)
    if accelerator.is_main_process:
        return found | ({_FILES: Kept(files)} if _hooks(accelerator) else {})
    if files:
        raise StateError(
            f"a hook wrote {min(files)!r} on process {accelerator.process_index}; only the main process's "
            "files are saved",
            remedy="let the hook write where accelerator.is_main_process is true",
        )
    # The main process has the position of all: the others do not read a loader that it dispatches.
    return {name: value for name, value in found.items() if name != _LOADERS}


def _name_parameters(model: Any, accelerator: Accelerator) -> None:
    """Give the groups of optimizers the names of a model that a hook has taken, as torch itself can."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in private("accelerate", accelerator, "_optimizers"):
        for group in optimizer.param_groups:
            if "param_names" not in group and all(id(parameter) in names for parameter in group["params"]):
                group["param_names"] = [names[id(parameter)] for parameter in group["params"]]


def _hooks(accelerator: Accelerator) -> bool:
    """Return whether there are hooks of any kind."""
    kinds = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
    return any(private("accelerate", accelerator, kind) for kind in kinds)


def _after_hooks(accelerator: Accelerator, files: Mapping[str, Any]) -> list[Any]:
    """Call the hooks of a load with a folder of the saved files, and return the models that are left."""
    models = list(private("accelerate", accelerator, "_models"))
    with tempfile.TemporaryDirectory(prefix="reknit-hooks-") as folder:
        for name, content in files.items():
            file = Path(folder, name).resolve()
            if not file.is_relative_to(Path(folder).resolve()):  # no save writes such a name
                raise FormatError(f"the checkpoint has a file of a hook outside of its folder: {name!r}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.tobytes())
        for hook in private("accelerate", accelerator, "_load_model_state_pre_hook").values():
            hook(models, folder)
    return models


def _files_in(folder: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), np.frombuffer(file.read_bytes(), np.uint8)


def _followed(accelerator: Accelerator) -> dict[str, Any]:
    """Return the positions of the prepared loaders, which count their batches from now on."""
    positions: dict[str, Any] = {}
    for number, loader in enumerate(private("accelerate", accelerator, "_dataloaders")):
        if hasattr(loader, "base_dataloader"):  # else it is not a loader of Accelerate
            if not issubclass(type(loader.base_dataloader), CountedLoader):
                if any(loader is other for other in accelerator.gradient_state.dataloader_references):
                    raise StateError(
                        f"the prepared loader {number} is in an epoch whose batches were not counted",
                        remedy="call reknit.integrations.accelerate.state(accelerator) after prepare, before "
                        "the loop",
                    )
                loader.base_dataloader = CountedLoader(
                    loader, accelerator.num_processes, split_batches=accelerator.split_batches
                )
            positions[str(number)] = loader.base_dataloader.position
    return positions
