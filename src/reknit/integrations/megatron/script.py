"""The calls of `megatron.core.dist_checkpointing`, for scripts that change one import.

`save`, `load` and `load_common_state_dict` stand in for those of `megatron.core.dist_checkpointing`.  They
take the result of `sharded_state_dict`, or in its place a model or an optimizer itself.  A distributed
optimizer is then saved in place, without a message, and loads into any layout.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import time
from argparse import Namespace
from contextlib import closing
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import reknit
from reknit.errors import CheckpointNotFoundError, MismatchError, UsageError
from reknit.integrations.megatron import private, sharded
from reknit.integrations.megatron.model import names_of, with_flat_leaves
from reknit.options import SaveOptions
from reknit.plugins.framework import tree
from reknit.plugins.store import Deadline, open_storage
from reknit.plugins.trainer import Kept, say_resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from reknit import LoadReport
    from reknit.options import LoadOptions

logger = logging.getLogger("reknit")

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in a run's folder that names its last iteration with a checkpoint."""

_COMMON = "common"
"""The item of all values other than tensors, as rank 0 has them."""

_CHUNK = re.compile(r"model(?:_?\d+)?")
_FOLDER = re.compile(r"iter_(\d{7,})")
_ENUM = re.compile(r"((?:megatron\.[\w.]+|signal))\.(\w+)\((-?\d+|'[^'\\]*')\)")
"""The text of a member of an enumeration, as common values of Megatron's own checkpoints have it."""
_STRICT = {"assume_ok_unexpected", "raise_unexpected", "raise_all"}
_RETURNS = {"return_unexpected", "return_all"}
_QUIET = {"ignore_all", *_RETURNS}
_POLL_S = 0.25


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    options: SaveOptions | None = None,
) -> Any:
    """Save a sharded state dict as one checkpoint.  Every rank calls it.

    Values beside the tensors are those of rank 0.  Chunks of one model (``model0``, ``model1``) are one item.
    A checkpoint that is there already is replaced by a safe switch.  `step` is by default the ``iteration``
    of the state dict, or the number in a folder's name such as ``iter_0000100``.  Access is always validated,
    so that `validate_access_integrity` and the preparation of the check of common values have no effect.

    With `async_sharded_save` the state is copied when this returns, and an agent writes; the answer is an
    `AsyncRequest` for Megatron's queue, whose first finalizing function raises the errors of the save.

    Raises `UsageError` for a strategy: reknit has one of its own.  All else is as for `reknit.save`.
    """
    _require_no_strategy(sharded_strategy, common_strategy)
    leaves, _, common = _parted(sharded_state_dict)
    if content_metadata is not None:
        common["content_metadata"] = content_metadata
    state = _items(leaves)
    if _COMMON in state:
        raise UsageError(f"the state dict has sharded parts under {_COMMON!r}", remedy="use another key")
    state[_COMMON] = Kept(common) if _rank() == 0 else sharded.local_object(None)
    number = _step(sharded_state_dict, checkpoint_dir) if step is None else step
    options = options or SaveOptions()
    pending = reknit.save(
        checkpoint_dir, state, step=number, wait=not async_sharded_save, overwrite=True, options=options
    )
    if not async_sharded_save:
        pending.result()
        return None
    # The queue is done when it is on all ranks, and one that looks is enough for the storage.
    patience_s = options.timeout_s if _rank() == 0 else 0.0
    return sharded.async_request(_wait_for, (str(checkpoint_dir), patience_s), pending.result)


def _wait_for(path: str, timeout_s: float) -> None:
    """Wait until a checkpoint is there; errors are raised where the save is finished."""
    deadline = Deadline(timeout_s)
    while deadline.remaining() > 0:
        try:
            checkpoint = reknit.open(path)
        except CheckpointNotFoundError:
            time.sleep(_POLL_S)
        else:
            if checkpoint.manifest.other is None:
                return
            time.sleep(_POLL_S)  # Megatron's own checkpoint, which this one replaces


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = "assume_ok_unexpected",
    *,
    options: LoadOptions | None = None,
) -> Any:
    """Load into the tensors of a sharded state dict; return a state dict of plain tensors and values.

    The tensors are filled where they are, models and optimizers themselves too.  Of `strict`, the values that
    log, return or ignore make the load lenient; with all others, every misfit raises `MismatchError` before
    anything changes.  The values that return give a triple: the state dict, the names that only the
    checkpoint has, and the names that only the state dict has.  `strict` may also be that of `reknit.load`;
    the log then has all that was left out.  Sharded parts are found by their keys, also where they have moved
    to another place of the state dict since.

    Raises `UsageError` for a strategy: reknit has one of its own.  All else is as for `reknit.load`.
    """
    _require_no_strategy(sharded_strategy, common_strategy)
    how, ours = _strictness(strict)
    leaves, local, _ = _parted(sharded_state_dict)
    kept = Kept()
    report = _load(checkpoint_dir, _items(leaves), kept, strict=ours, options=options)
    # Megatron's own checkpoint has the options of an optimizer here, which a live one has taken.
    live = {key for key, value in leaves.items() if not isinstance(value, (dict, list, tuple))}
    common = {key: value for key, value in kept.values.items() if key not in live}
    answer = sharded.merged(_with_enums(common), sharded.unwrapped(leaves))
    answer = sharded.merged(answer, sharded.unwrapped(local))
    if _rank() == 0:
        say_resumed(report, dist.get_world_size() if dist.is_initialized() else 1)
    if how not in _STRICT | _QUIET:
        _log(report, extra=how == "log_all")
    if how not in _RETURNS:
        return answer
    only_there = set(report.unexpected) if how == "return_all" else set()
    return answer, only_there, set(report.missing)


def _load(
    path: str | PathLike[str], items: dict[str, Any], kept: Kept, *, strict: Any, options: LoadOptions | None
) -> LoadReport:
    """Load items, as they are if they fit, else as the checkpoint has their keys.

    That something does not fit anywhere is an error on every rank, so all of them load once more.
    """
    try:
        return reknit.load(path, {**items, _COMMON: kept}, options=options)
    except MismatchError:
        items = _by_key(items, path)
    return reknit.load(path, {**items, _COMMON: kept}, strict=strict, options=options)


def _by_key(items: dict[str, Any], path: str | PathLike[str]) -> dict[str, Any]:
    """Return items with every sharded part in the one in which the checkpoint has its key.

    A live model or optimizer has its item for itself: nothing is put beside it.
    """
    with reknit.open(path) as checkpoint:
        saved = {item: {*checkpoint.tensors[item], *checkpoint.values[item]} for item in checkpoint.items}
    live = {item for item, value in items.items() if not all(map(sharded.is_sharded, sharded.nested(value)))}
    moved: dict[str, list[Any]] = {}
    gone: set[int] = set()
    for item in items.keys() - live:
        for part in sharded.nested(items[item]):
            homes = [home for home, known in saved.items() if known.issuperset(names_of(part))]
            if item not in homes and len(homes) == 1 and homes[0] not in live:
                moved.setdefault(homes[0], []).append(part)
                gone.add(id(part))
    found: dict[str, Any] = sharded.split_leaves(items, lambda leaf: id(leaf) in gone)[1]
    for home, more in moved.items():
        found[home] = [*([found[home]] if found.get(home) else []), *more]
    return found


def load_common_state_dict(
    checkpoint_dir: str | PathLike[str], *, options: LoadOptions | None = None
) -> dict[str, Any]:
    """Return the rest of a checkpoint beside sharded tensors and objects, as rank 0 saved it.

    Every rank calls it.
    """
    kept = Kept()
    reknit.load(checkpoint_dir, {_COMMON: kept}, options=options)
    values: dict[str, Any] = _with_enums(kept.values)
    return values


def _with_enums(values: Any) -> Any:
    """Return common values with the members of Megatron's enumerations in place of their texts.

    Megatron's own checkpoint names the class of a member, which nothing imports; here it is imported already.
    """
    if type(values) is str:
        return _member(values)
    if type(values) is Namespace:
        return Namespace(**_with_enums(vars(values)))
    if type(values) is dict:
        return {key: _with_enums(one) for key, one in values.items()}
    return type(values)(map(_with_enums, values)) if type(values) in (list, tuple) else values


def _member(text: str) -> Any:
    found = _ENUM.fullmatch(text)
    kind = None if found is None else getattr(sys.modules.get(found[1]), found[2], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, Enum)):
        return text
    value = ast.literal_eval(found[3])
    return kind(value) if value in [member.value for member in kind] else text


def iteration_folder(root: str | PathLike[str], iteration: int) -> str:
    """Return the folder in which Megatron's scripts keep the checkpoint of an iteration."""
    return f"{str(root).rstrip('/')}/iter_{iteration:07d}"


def mark_latest(root: str | PathLike[str], iteration: int) -> None:
    """Write the iteration of the last checkpoint into a run's folder.  One rank does it, after the save."""
    with closing(open_storage(root)) as storage:
        storage.put(TRACKER, str(iteration).encode(), if_absent=False)


def _parted(state: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the sharded or live parts of a state dict, the parts that are marked as local, and the rest."""
    if tree.any_leaf(state, lambda _: False):
        raise tree.too_deep("the state dict")
    leaves, others = sharded.split_leaves(state, private.is_leaf)
    return leaves, *sharded.split_leaves(others, sharded.is_local)


def _items(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of a state: the chunks of a model are one, and so is a model's own state dict."""
    items: dict[str, Any] = {}
    chunks: list[Any] = []
    own: dict[str, Any] = {}
    for key, value in leaves.items():
        if sharded.is_tensor(value) or key.endswith("_extra_state"):
            own[key] = value
        elif _CHUNK.fullmatch(key):
            chunks += value if isinstance(value, list) else [value]
        else:
            items[key] = with_flat_leaves(value)
    if own:
        chunks.append(own)
    if chunks:
        items["model"] = chunks
    return items


def _require_no_strategy(*strategies: Any) -> None:
    if any(strategy is not None for strategy in strategies):
        raise UsageError(
            "reknit writes in a format of its own, and takes no strategy",
            remedy="leave sharded_strategy and common_strategy out",
        )


def _strictness(strict: Any) -> tuple[str, Any]:
    """Return Megatron's name of a strictness, and the value of it that `reknit.load` takes."""
    if isinstance(strict, (bool, list, tuple)):
        return "log_all", strict
    how = strict.value if isinstance(strict, Enum) else strict
    if how not in _STRICT | _QUIET | {"log_unexpected", "log_all"}:
        raise UsageError(
            f"strict is a StrictHandling, its value, a bool or a list of patterns, not {strict!r}",
            remedy="to load the entries that fit, pass strict=False",
        )
    return str(how), how in _STRICT


def _log(report: LoadReport, *, extra: bool) -> None:
    for name in report.missing:
        logger.warning("load from %s: the checkpoint does not have %s", report.path, name)
    for name, why in report.mismatched.items():
        logger.warning("load from %s: %s: %s", report.path, name, why)
    for name in report.unexpected if extra else ():
        logger.warning("load from %s: the state dict does not have %s", report.path, name)


def _step(state: Mapping[str, Any], checkpoint_dir: str | PathLike[str]) -> int | None:
    iteration = state.get("iteration")
    if isinstance(iteration, int):
        return iteration
    folder = _FOLDER.fullmatch(str(checkpoint_dir).rstrip("/").rpartition("/")[2])
    return int(folder[1]) if folder else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
