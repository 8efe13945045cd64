"""What does Orbax mean by an argument?  An item of a checkpoint for a save, a target for a restore."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import glob
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from orbax import checkpoint as ocp

from reknit.api import loads
from reknit.errors import MismatchError, UsageError, shown
from reknit.frameworks import tree
from reknit.frameworks.per_rank import PerRank
from reknit.frameworks.stateful import Kept, is_stateful
from reknit.integrations.orbax.contents import CUSTOM, DEFAULT, contents, generators, is_kept
from reknit.integrations.orbax.leaves import PLACEHOLDER, name_of, target_of, with_dtypes, with_typed_keys
from reknit.options import CommOptions, LoadOptions
from reknit.ranks import acting
from reknit.runs.load_step import say_resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reknit.engine.loading.browse import Checkpoint

_TREES = (ocp.args.StandardRestore, ocp.args.PyTreeRestore)
_KEPT = (ocp.args.JsonSave, ocp.args.NumpyRandomKeySave)
_KEPT_BACK = (ocp.args.JsonRestore, ocp.args.NumpyRandomKeyRestore)
_AS_THEY_ARE = (
    ocp.args.StandardSave,
    ocp.args.PyTreeSave,
    ocp.args.ArraySave,
    ocp.args.JaxRandomKeySave,
)


class ItemTarget(NamedTuple):
    """The target of one item: its place in the state, and a function that returns the restored object.

    With `partly`, names that only the checkpoint has are left out.  `only` are patterns of the names to load.
    """

    target: Any
    restored: Callable[[Any], Any]
    partly: bool = False
    only: tuple[str, ...] = ()


def saved_state(args: Any, custom: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of a save: the items of a Composite, or one item.  Raises `UsageError`."""
    items = dict(args.items()) if isinstance(args, ocp.args.Composite) else {DEFAULT: args}
    if CUSTOM in items:
        raise UsageError(f"the item {CUSTOM!r} is reknit's own", remedy="give yours another name")
    state = {name: _saved(name, arg) for name, arg in items.items() if arg is not None}
    return state if custom is None else {**state, CUSTOM: Kept(dict(custom))}


def _saved(name: str, args: Any) -> Any:
    item = with_dtypes(getattr(args, "item", None), getattr(args, "save_args", None))
    if item is not None and _is_iterator(item):
        return PerRank(Kept(item.get_state()))
    if isinstance(args, _AS_THEY_ARE):
        return item
    if isinstance(args, _KEPT):
        return Kept(item)
    raise UsageError(
        f"the item {name!r} is to be saved by {shown(args)}, which writes files of its own",
        remedy="pass StandardSave, PyTreeSave, ArraySave, JsonSave or a random key's Save",
    )


def restored(path: str, args: Any, checkpoint: Checkpoint, only: str | None = None) -> Any:
    """Restore the items of the arguments, or all items without arguments.

    The result is a Composite, or one object for arguments that are not one.  `only` is the item that they
    mean then.  Raises the errors of `reknit.load`, and `UsageError`.
    """
    single = not isinstance(args, ocp.args.Composite)
    items = {} if single else dict(args.items())
    known = [name for name in checkpoint.items if name != CUSTOM]
    if not single and not items:
        items = dict.fromkeys(known)
    if single:
        one = only or (DEFAULT if DEFAULT in known or len(known) != 1 else known[0])
        single = args is not None or only is not None or one in known
        items = {one: args} if single else dict.fromkeys(known)
    wanted = {name: _wanted(name, arg, checkpoint) for name, arg in items.items()}
    found = {
        name: with_typed_keys(value, generators(checkpoint, name))
        for name, value in _load(path, wanted).items()
    }
    return next(iter(found.values())) if single else ocp.args.Composite(**found)


def restored_tree(path: str, args: Any, checkpoint: Checkpoint) -> Any:
    """Restore a tree that Orbax saved alone, whose first keys are items.  Raises as `restored`."""
    items = [name for name in checkpoint.items if name != CUSTOM]
    if (item := getattr(args, "item", None)) is None:
        return dict(restored(path, ocp.args.Composite(**dict.fromkeys(items)), checkpoint).items())
    children, build = _one_level(item)
    given, _ = _one_level(getattr(args, "restore_args", None))
    partly = getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {}
    if (more := [name for name in items if name not in children]) and not partly:
        raise MismatchError(
            f"the checkpoint has {', '.join(map(repr, more[:5]))}, which the target lacks",
            path=path,
            remedy="restore with the target of the save, or with PyTreeRestore(partial_restore=True)",
        )
    parts = {
        name: replace(args, item=child, **({"restore_args": given[name]} if given else {}))
        for name, child in children.items()
    }
    found = dict(restored(path, ocp.args.Composite(**parts), checkpoint).items())
    return jax.tree_util.tree_unflatten(build, [found[name] for name in children])


def _one_level(value: Any) -> tuple[dict[str, Any], Any]:
    """Return the children of a tree by the names of their items, and its structure."""
    paths, build = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    return {name_of(path): inner for path, inner in paths}, build


def _load(path: str, wanted: Mapping[str, ItemTarget]) -> dict[str, Any]:
    """Load all items; values are cast to the dtypes of their targets, as Orbax does."""
    state = {name: each.target for name, each in wanted.items()}
    strict: Any = [f"!{name}/*" for name, each in wanted.items() if each.partly] or True
    only: list[str] = []
    if any(each.only for each in wanted.values()):
        only = [pattern for name, each in wanted.items() for pattern in each.only or (name, f"{name}/*")]
    try:
        report = loads.load(path, state, strict=strict, options=LoadOptions(cast=True, only=tuple(only)))
    except MismatchError as error:
        items = ", ".join(f"{name!r}: ..." for name in state)
        error.remedy = (
            f"{error.remedy}; for a part of the checkpoint: PyTreeRestore(..., partial_restore=True), or "
            f"reknit.load({path!r}, state, ...) with state = {{{items}}}"
        )
        raise
    if report.missing or report.mismatched:
        lines = [*report.missing, *(f"{name}: {why}" for name, why in report.mismatched.items())]
        raise MismatchError(
            f"the checkpoint does not fit the target: {'; '.join(lines[:5])}",
            path=path,
            remedy="restore with the target of the save, or leave these names out of it",
        )
    group = acting(None, CommOptions()).group
    if group.rank == 0:
        say_resumed(report, group.size)
    return {name: each.restored(state[name]) for name, each in wanted.items()}


def _wanted(name: str, args: Any, checkpoint: Checkpoint) -> ItemTarget:
    """Return the target of one item.  Raises `UsageError` for arguments without a counterpart."""
    item = getattr(args, "item", None)
    if _is_iterator(item):
        return _of_iterator(name, item)
    if is_stateful(item):
        return ItemTarget(item, lambda _: item)
    if isinstance(args, _KEPT_BACK) or is_kept(checkpoint, name):
        kept = Kept()
        return ItemTarget(kept, lambda _: kept.values)
    if args is None or isinstance(args, ocp.args.JaxRandomKeyRestore):
        return ItemTarget(contents(checkpoint, name), _itself)
    if isinstance(args, ocp.args.ArrayRestore):
        like = contents(checkpoint, name) if item is None else item
        return ItemTarget(target_of(like, args.restore_args), _itself)
    if not isinstance(args, _TREES):
        raise UsageError(
            f"the item {name!r} is to be restored by {shown(args)}, which reads files of its own",
            remedy="pass the Restore that belongs to the Save of this item",
        )
    _refuse_other(args)
    if item is None:
        item = contents(checkpoint, name)
    given = getattr(args, "restore_args", None)
    target = jax.tree.map(target_of, item) if given is None else jax.tree.map(target_of, item, given)
    partly = getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {}
    if not any(leaf is PLACEHOLDER for leaf in jax.tree.leaves(item)):
        return ItemTarget(target, _itself, partly)
    return ItemTarget(
        target,
        lambda new: jax.tree.map(lambda leaf, value: leaf if leaf is PLACEHOLDER else value, item, new),
        partly,
        tuple(_patterns(name, item)),
    )


def _patterns(name: str, item: Any) -> Iterator[str]:
    """Yield a pattern for each leaf that is not left out, in the names of a checkpoint."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(item)[0]:
        if leaf is not PLACEHOLDER:
            yield glob.escape(tree.join(name, name_of(path)))


def _itself(value: Any) -> Any:
    return value


def _refuse_other(args: Any) -> None:
    if getattr(args, "transforms", None) or getattr(args, "legacy_transform_fn", None):
        raise UsageError(
            "transforms of Orbax have no counterpart here",
            remedy="rename with reknit.load(path, state, options=LoadOptions(transforms=[...]))",
        )
    if not getattr(args, "strict", True):
        raise UsageError(
            "with strict=False, Orbax pads or cuts arrays of another shape; reknit does not",
            remedy="restore with the shapes that were saved, and pad or cut afterwards",
        )


def _is_iterator(item: Any) -> bool:
    return callable(getattr(item, "get_state", None)) and callable(getattr(item, "set_state", None))


def _of_iterator(name: str, item: Any) -> ItemTarget:
    kept = Kept(PLACEHOLDER)

    def continued(_: Any) -> Any:
        if kept.values is PLACEHOLDER:
            raise MismatchError(
                f"{name} has the positions of another number of processes",
                remedy="restore it on as many processes as saved it, or leave it out",
            )
        item.set_state(kept.values)
        return item

    return ItemTarget(PerRank(kept), continued)
