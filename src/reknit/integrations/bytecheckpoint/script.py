"""The calls of ByteCheckpoint, for scripts that change one import.

`save`, `load`, the three checkpointers and `find_latest_ckpt_path` take the arguments of ByteCheckpoint
0.0.3, and of its papers.  The checkpoints are reknit's: no folder for each part, no step without a commit.
"""

from __future__ import annotations

import logging
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import reknit
from reknit import PerRank
from reknit.errors import UsageError, shown
from reknit.locations import location_text
from reknit.options import LoadOptions, SaveOptions
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import Kept, acting, ask_root, below, manifest_in, wait_for_agents
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from reknit import LoadReport, PendingSave
    from reknit.plugins.trainer import Group

logger = logging.getLogger("reknit")

FRAMEWORKS = ("ddp", "fsdp", "fsdp2", "megatron", "vescale")
"""The frameworks that `save` and `load` accept: those of the release, and two of the papers."""

_PARTS = ("model", "optimizer", "dataloader", "extra_state")
_OF_RANKS = "extra_state_of_ranks"
_SETTLE_S = 300.0
_FIRST = "extra_state"
"""The item with the extra state of rank 0, for ranks that have none of their own."""


def save(
    ckpt_path: str | PathLike[str],
    checkpoint_state: dict[str, Any],
    framework: str,
    fast_saving: bool = False,
    global_steps: int | None = None,
    callback: Callable[[], object] | None = None,
    role: str | None = None,
    ignore_append_global_steps_to_folder: bool | None = False,
    *,
    save_decomposed_model_optimizer: bool = False,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Save the state as one checkpoint, at `ckpt_path` or in its folder ``global_step_N``.

    Every rank calls it.  The state has a ``model``, and may have an ``optimizer``, a ``dataloader`` and an
    ``extra_state``: a value of each rank's own.  A checkpoint that is there already is replaced by a safe
    switch.  With `fast_saving` training goes on while an agent writes.  Rank 0 calls `callback` after the
    commit, with `fast_saving` in a thread.  The checkpoint records `framework` and `role`.

    Raises `UsageError` for another framework or part of the state, and for a checkpoint of another role that
    would be replaced.  All else is as for `reknit.save`, of which `options` are too.
    """
    _check(checkpoint_state, framework, role, "save")
    group, options = _group(options or SaveOptions()), options or SaveOptions()
    steps = None if ignore_append_global_steps_to_folder else global_steps
    path = str(location_text(ckpt_path))
    path = path if steps is None else below(path, f"global_step_{steps}")
    _check_role(group, path, role, options.timeout_s, "replace")
    state = dict(checkpoint_state)
    if _FIRST in state:
        extra = Kept(state.pop(_FIRST))
        state[_OF_RANKS] = PerRank(extra)
        if group.rank == 0:
            state[_FIRST] = extra
    pending = reknit.save(
        path,
        state,
        step=global_steps,
        wait=not fast_saving,
        overwrite=True,
        options=options,
        metadata={"framework": framework, "role": role},
    )
    if callback is not None and group.rank == 0:
        if fast_saving:
            start_thread("reknit-callback", partial(_call_after, pending, callback))
        else:
            _call_after(pending, callback)
    return pending


def load(
    ckpt_path: str | PathLike[str],
    checkpoint_state: dict[str, Any],
    framework: str,
    fast_loading: bool = False,
    strict: bool | Sequence[str] = True,
    role: str | None = None,
    *,
    load_decomposed_model_optimizer: bool = False,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Load a checkpoint of any layout: model, optimizer and data loader in place, the extra state replaced.

    Every rank calls it.  A rank receives its own extra state if the number of ranks is that of the save, and
    else that of rank 0.  Parts that are missing or None in the state are not loaded.

    Raises `UsageError` for a checkpoint of another role.  All else is as for `reknit.load`.
    """
    _check(checkpoint_state, framework, role, "load")
    options = options or LoadOptions()
    _check_role(_group(options), str(location_text(ckpt_path)), role, options.timeout_s, "load")
    state = {part: value for part, value in checkpoint_state.items() if value is not None}
    if absent := [part for part in ("model", "optimizer", _FIRST) if part not in state]:
        logger.warning("load from %s: %s: not in the state, so not loaded", ckpt_path, ", ".join(absent))
    own, first = Kept(None), Kept(None)
    if _FIRST in state:
        state[_FIRST], state[_OF_RANKS] = first, PerRank(own)
    report = reknit.load(ckpt_path, state, strict=strict, options=options)
    if _FIRST in state:
        checkpoint_state[_FIRST] = first.values if own.values is None else own.values
    return report


def find_latest_ckpt_path(path: str | PathLike[str] | None) -> str | None:
    """Return the path of the newest committed checkpoint directly below a folder, or None.

    It needs no file ``latest_checkpointed_iteration.txt``, and never returns a folder without a commit.  It
    first waits, up to five minutes, for agents on this host that still write for a run that has ended.
    """
    if path is None:
        return None
    with closing(open_storage(path)) as storage:
        wait_for_agents(storage, _SETTLE_S)
    return reknit.latest(path)


class _OfFramework:
    """The class methods of ByteCheckpoint's checkpointers."""

    framework = ""

    @classmethod
    def save(
        cls, ckpt_path: str | PathLike[str], checkpoint_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> PendingSave:
        """Save as the function `save` does, with its arguments after `framework`."""
        return save(ckpt_path, checkpoint_state, cls.framework, *args, **kwargs)

    @classmethod
    def load(
        cls, ckpt_path: str | PathLike[str], checkpoint_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> LoadReport:
        """Load as the function `load` does, with its arguments after `framework`."""
        return load(ckpt_path, checkpoint_state, cls.framework, *args, **kwargs)


class DDPCheckpointer(_OfFramework):
    """Saves and loads models under DistributedDataParallel."""

    framework = "ddp"


class FSDPCheckpointer(_OfFramework):
    """Saves and loads models under FullyShardedDataParallel."""

    framework = "fsdp"


class FSDP2Checkpointer(_OfFramework):
    """Saves and loads models under fully_shard."""

    framework = "fsdp2"


def _check(state: Any, framework: Any, role: Any, call: str) -> None:
    if framework not in FRAMEWORKS:
        raise UsageError(
            f"{call} was called with framework={shown(framework)}", remedy=f"one of {', '.join(FRAMEWORKS)}"
        )
    if not isinstance(state, dict) or "model" not in state:
        raise UsageError(f"checkpoint_state is a dict with a model, not {shown(state)}")
    if others := sorted(set(state) - set(_PARTS), key=str):
        raise UsageError(
            f"checkpoint_state has the parts {', '.join(map(str, others))}",
            remedy=f"it has {', '.join(_PARTS)}; put all else into extra_state, or call reknit.{call}",
        )
    if role is not None and not (isinstance(role, str) and role):
        raise UsageError(f"role is a text such as 'actor', or None, not {shown(role)}")


def _group(options: SaveOptions | LoadOptions) -> Group:
    return acting(None, options.comm).group


def _check_role(group: Group, path: str, role: str | None, timeout_s: float, what: str) -> None:
    """Raise `UsageError` if a role is given, and the checkpoint at a path records another one."""
    if role is None:
        return
    if (there := ask_root(group, "role", timeout_s, partial(_role_at, path), path)) not in (None, role):
        raise UsageError(
            f"{path} has a checkpoint of the role {there!r}, which {role!r} would {what}",
            path=path,
            remedy="give each role a path of its own",
        )


def _role_at(path: str) -> str | None:
    with closing(open_storage(path)) as storage:
        manifest = manifest_in(storage)
    role = None if manifest is None else manifest.metadata.get("role")
    return role if isinstance(role, str) else None


def _call_after(pending: PendingSave, callback: Callable[[], object]) -> None:
    """Call a function once a save is committed; a save that failed raises its error elsewhere."""
    pending.wait()
    if pending.error is None:
        callback()
