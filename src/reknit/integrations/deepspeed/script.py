"""The save and load of a whole DeepSpeed engine with one call.

In the place of `engine.save_checkpoint` and `engine.load_checkpoint`, for ZeRO stages 0 to 3.  The checkpoint
has no trace of the stage and the number of ranks.  It loads into engines with other stages and numbers, and
into plain modules.  `take_over` lets a script keep the calls of its engine.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import reknit
from reknit.errors import MismatchError, UsageError
from reknit.integrations.deepspeed import private
from reknit.integrations.formats.programs import newest_of_others
from reknit.integrations.formats.recognise import run_of_others
from reknit.locations import location_text
from reknit.options import CommOptions, LoadOptions, SaveOptions
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import Accessors, Kept, acting, ask_root, say_resumed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from reknit import PendingSave

_DEEPSPEED = "DeepSpeed"
_OWN = ("model", "optimizer", "lr_scheduler", "engine", "client_state")


def save(
    engine: Any,
    path: str | PathLike[str],
    *,
    step: int | None = None,
    client_state: Mapping[str, Any] | None = None,
    items: Mapping[str, Any] | None = None,
    wait: bool = True,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    group: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> PendingSave:
    """Save all that an engine has: model, optimizer, scheduler, loss scaler, counters, and `client_state`.

    Every rank calls it with the same `path`.  `step` is by default the engine's number of steps.  `load`
    returns the `client_state`, and fills `items` in place (more items of the state: data loaders, averages of
    the weights).  All else is as for `reknit.save`, and so are the errors.
    """
    state = _state(engine, items)
    state["client_state"] = Kept(dict(client_state or {}))
    return reknit.save(
        path,
        state,
        step=engine.global_steps if step is None else step,
        wait=wait,
        overwrite=overwrite,
        options=options,
        group=group,
        metadata=metadata,
    )


def load(
    engine: Any,
    path: str | PathLike[str],
    *,
    items: Mapping[str, Any] | None = None,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    strict: bool | Sequence[str] = True,
    options: LoadOptions | None = None,
    group: Any = None,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint of `save`, of any stage and number of ranks; return the path and the client state.

    Every rank calls it, between two steps.  Without the optimizer's states, its copies of the weights follow
    the model.  With `load_module_only` nothing but the model is loaded, and the client state is empty: that
    takes any checkpoint that has an item ``model``.  `engine.reknit_report` is the report.  All else is as
    for `reknit.load`, and so are the errors.
    """
    state = _state(engine, items)
    kept = state["client_state"] = Kept()
    if load_module_only:
        state = {"model": state["model"]}
    if not load_optimizer_states:
        state.pop("optimizer", None)
    if not load_lr_scheduler_states:
        state.pop("lr_scheduler", None)
    engine.reknit_report = reknit.load(path, state, strict=strict, options=options, group=group)
    return location_text(path), kept.values


def take_over(
    engine: Any,
    *,
    items: Mapping[str, Any] | None = None,
    wait: bool = True,
    options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> None:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` save and load with reknit from now on.

    Their arguments and results stay those of DeepSpeed.  A checkpoint is the folder of its tag, as before; a
    load without a tag takes the newest committed one, and needs no file ``latest``; beside checkpoints of
    DeepSpeed alone it raises `UsageError`.  The log has one line about each load, and `engine.reknit_report`
    is the report.  With ``wait=False``, training continues while a checkpoint is written.

    Raises `UsageError` for any other object.
    """
    _require_engine(engine)
    calls = _Calls(engine, items, wait, options, load_options)
    engine.save_checkpoint, engine.load_checkpoint = calls.save_checkpoint, calls.load_checkpoint


@dataclass
class _Calls:
    """The calls of an engine that save and load, with the arguments of `take_over`."""

    engine: Any
    items: Mapping[str, Any] | None
    wait: bool
    options: SaveOptions | None
    load_options: LoadOptions | None

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the engine in the folder of a tag; return True.  The newest one is always the latest."""
        if exclude_frozen_parameters:
            raise UsageError(
                "a checkpoint of reknit has all parameters",
                remedy="leave exclude_frozen_parameters out; unchanged files are linked, not written again",
            )
        save(
            self.engine,
            _tagged(save_dir, f"global_step{self.engine.global_steps}" if tag is None else tag),
            client_state=client_state,
            items=self.items,
            wait=self.wait,
            overwrite=True,
            options=self.options,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: Any = None,
        load_module_strict: bool | Sequence[str] = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a tag, or the newest committed one; return its path and the client state, or None and {}."""
        if custom_load_fn is not None:
            raise UsageError("reknit loads in place, without a custom_load_fn", remedy="leave it out")
        path = _newest(load_dir) if tag is None else _tagged(load_dir, tag)
        if path is None:
            return None, {}
        try:
            found = load(
                self.engine,
                path,
                items=self.items,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                strict=load_module_strict,
                options=self.load_options,
            )
        except MismatchError as error:
            error.remedy = _in_words_of_engine(error.remedy or "")
            raise
        if self.engine.global_rank == 0:
            say_resumed(self.engine.reknit_report, self.engine.world_size)
        return found


def _in_words_of_engine(remedy: str) -> str:
    """Return a remedy that names the keyword of `load_checkpoint` in place of that of `reknit.load`."""
    own = remedy.replace("reknit.load(..., strict=", "load_checkpoint(..., load_module_strict=")
    return own.replace("as in strict=", "as in load_module_strict=")


def _tagged(root: str | PathLike[str], tag: Any) -> str:
    return f"{location_text(root).rstrip('/')}/{tag}"


def _newest(root: str | PathLike[str]) -> str | None:
    """Return the newest committed checkpoint below a folder, the same on all ranks, or None."""
    comm = CommOptions()
    found: str | None = ask_root(
        acting(None, comm).group, "find", SaveOptions().timeout_s, partial(_newest_here, root)
    )
    return found


def _newest_here(root: str | PathLike[str]) -> str | None:
    """Return the newest committed checkpoint.  Raises `UsageError` if there are only those of DeepSpeed."""
    if (found := reknit.latest(root)) is not None:
        return found
    with closing(open_storage(root)) as storage:
        newest, run = newest_of_others(storage), run_of_others(storage)
    # A script that begins may have files of other programs beside, such as the base model.
    what = None if run is None or run.kind != _DEEPSPEED else run.what
    if newest is not None and newest[1].kind == _DEEPSPEED:
        what = f"{newest[1].what}, {newest[0]}"
    if what is not None:
        raise UsageError(
            f"there is no checkpoint of reknit below {location_text(root)}, but {what}",
            remedy="call engine.load_checkpoint before take_over(engine), so that DeepSpeed loads it; to "
            "begin anew, leave engine.load_checkpoint out",
            path=location_text(root),
        )
    return None


def _require_engine(engine: Any) -> None:
    if not private.is_engine(engine):
        raise UsageError(
            f"a {type(engine).__name__} is not a DeepSpeed engine",
            remedy="pass the first result of deepspeed.initialize",
        )


def _state(engine: Any, items: Mapping[str, Any] | None) -> dict[str, Any]:
    _require_engine(engine)
    taken = sorted(set(items or ()) & set(_OWN))
    if taken:
        raise UsageError(f"the items {taken} are the engine's own", remedy="give yours other names")
    progress = Accessors(partial(private.progress, engine), partial(private.set_progress, engine))
    state: dict[str, Any] = {"model": engine, "engine": progress, **(items or {})}
    if (optimizer := private.stepped_by(engine)) is not None:
        state["optimizer"] = optimizer
    if engine.lr_scheduler is not None:
        state["lr_scheduler"] = engine.lr_scheduler
    return state
