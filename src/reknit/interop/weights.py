"""Which weights does an item hold, under the names of Hugging Face libraries?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from reknit.engine.loading.match import require_covered
from reknit.engine.record.file_checks import read_checked
from reknit.engine.stored.renaming import names_in
from reknit.errors import MismatchError, UsageError
from reknit.frameworks.tree import unescape
from reknit.interop.data_headers import tied_names
from reknit.interop.tensor_stream import read_boxes, stream_with
from reknit.monitor.phase import Recorder
from reknit.transforms.apply import Transformed
from reknit.types.shard import Shard, TensorSpec
from reknit.types.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.interop.tensor_stream import Fills, StreamPiece
    from reknit.transforms.base import Rule

_OPTIONS = re.compile(r"((?:.*/)?)param_groups/[^/]+")


@dataclass
class Weights:
    """The weights of an item by number: names outside, specs, and the function that fills boxes of them.

    `tied` maps a weight that is only another name of a weight to that.  `left_out` are tensors and other
    items that are not weights, with the reason.
    """

    names: dict[int, str]
    specs: Mapping[int, TensorSpec]
    tied: Mapping[int, int]
    fill: Callable[[Fills], None]
    left_out: dict[str, str] = field(default_factory=dict)

    def pieces(self, numbers: Sequence[int]) -> Iterator[StreamPiece]:
        """Yield some weights one after another, in pieces of bounded size."""
        return stream_with({number: self.specs[number] for number in numbers}, self.fill)

    def of_adapter(self, adapter: str) -> Weights:
        """Return the weights of one adapter of PEFT, by their names in a folder of PEFT.

        Raises `MismatchError` without such weights.
        """
        renamed = {number: _adapter_name(name, adapter) for number, name in self.names.items()}
        names = {number: name for number, name in renamed.items() if name is not None}
        if not names:
            raise MismatchError(
                f"the item has no weights of an adapter {adapter!r}",
                remedy="give the name of an adapter of PEFT, which is 'default' if nobody chose another",
            )
        tied = {one: other for one, other in self.tied.items() if {one, other} <= names.keys()}
        return replace(self, names=names, tied=tied)


def weights_of(checkpoint: OpenCheckpoint, item: str, rules: Sequence[Rule]) -> Weights:
    """Return the weights of an item, after rules that give them other names and cuts.

    Raises `UsageError` without weights, and `MismatchError` if two would have one name, or as the rules do.
    """
    entries = checkpoint.index.tensors
    numbers = {entry.fqn: number for number, entry in enumerate(entries) if entry.item == item}
    if not numbers:
        have = ", ".join(repr(name) for name in dict.fromkeys(entry.item for entry in entries))
        raise UsageError(
            f"the checkpoint has no item {item!r} with tensors",
            path=checkpoint.storage.url,
            remedy=f"choose one of {have}" if have else "it holds no tensors at all",
        )
    states = _optimizer_states(checkpoint, item, numbers)
    if len(states) == len(numbers):
        raise UsageError(
            f"the item {item!r} has states of an optimizer, and a Hugging Face folder has only weights",
            path=checkpoint.storage.url,
            remedy="choose the item of the model, or export to torch or dcp",
        )
    weights = {fqn: number for fqn, number in numbers.items() if fqn not in states}
    left_out = {plain_name(fqn): "it is a state of an optimizer" for fqn in states}
    others = [one for one in checkpoint.offered if one != item]
    left_out |= dict.fromkeys(others, f"only the item {item!r} is exported")
    require_covered(checkpoint.index, list(weights.values()))
    tied = tied_names(checkpoint, list(weights.values()))
    if rules:
        found = _transformed(checkpoint, item, weights, tied, rules)
    else:
        names = {number: fqn for fqn, number in weights.items()}
        specs = {number: entries[number].spec for number in names}
        fill = partial(read_boxes, checkpoint, recorder=Recorder("read", path=checkpoint.storage.url))
        found = Weights(names, specs, tied, fill)
    return replace(found, names=_plain_names(found.names, checkpoint.storage.url), left_out=left_out)


def plain_name(fqn: str) -> str:
    """Return the name of a tensor in other tools: keys joined by dots, without escapes."""
    return ".".join(str(unescape(element)) for element in fqn.split("/"))


def _plain_names(fqns: Mapping[int, str], url: str) -> dict[int, str]:
    """Return the name that each tensor has outside.  Raises `MismatchError` when two would have one name."""
    names = {number: plain_name(fqn) for number, fqn in fqns.items()}
    seen: dict[str, int] = {}
    for number, name in names.items():
        if (other := seen.setdefault(name, number)) != number:
            raise MismatchError(
                f"{fqns[other]!r} and {fqns[number]!r} are different tensors, and both would be named "
                f"{name!r}",
                path=url,
                remedy="export reads an item that was saved from one module or flat mapping",
            )
    return names


def _optimizer_states(checkpoint: OpenCheckpoint, item: str, fqns: Mapping[str, int]) -> set[str]:
    """Return the tensors of an item that are states of optimizers, whose options are among its values."""
    values: set[str] = set()
    for blob in checkpoint.manifest.blobs:
        if checkpoint.renamed is None and blob.item == item and blob.coordinate is None:
            file, block = checkpoint.files[blob.path], checkpoint.manifest.block_nbytes
            values.update(names_in(checkpoint.read(partial(read_checked, file=file, block_nbytes=block))))
    roots = {f"{match[1]}state/" for match in map(_OPTIONS.fullmatch, values) if match}
    return {fqn for fqn in fqns if fqn.startswith(tuple(roots))}


def _transformed(
    checkpoint: OpenCheckpoint,
    item: str,
    numbers: Mapping[str, int],
    tied: Mapping[int, int],
    rules: Sequence[Rule],
) -> Weights:
    """Return the weights that rules make of some tensors of an item."""
    before = checkpoint.of_items([item]).catalog()
    kept = {fqn: spec for fqn, spec in before.tensors[item].items() if fqn in numbers}
    catalog = structs.replace(before, tensors={item: kept}, blobs={item: {}})
    transformed = Transformed.of(rules, catalog)
    if transformed.idle:
        raise next(iter(transformed.idle.values()))
    made = transformed.catalog.tensors[item]
    names = dict(enumerate(made))
    recorder = Recorder("read", path=checkpoint.storage.url)

    def fill(fills: Fills) -> None:
        shards = tuple(
            Shard(item, names[number], made[names[number]], box, None, array) for number, box, array in fills
        )
        wanted = transformed.back(Wanted((item,), shards))
        if wanted.aliases:
            raise MismatchError(
                f"the rules make one tensor of {wanted.aliases[0][1]!r} and {wanted.aliases[0][3]!r}, which "
                "an export does not compare",
                remedy="drop one of them first",
            )
        parts = [(numbers[shard.fqn], shard.box, shard.data) for shard in wanted.shards]
        if parts:
            read_boxes(checkpoint, parts, recorder)
        wanted.deliver()

    return Weights(
        names, {n: made[fqn] for n, fqn in names.items()}, _ties(transformed, names, numbers, tied), fill
    )


def _ties(
    transformed: Transformed,
    names: Mapping[int, str],
    numbers: Mapping[str, int],
    tied: Mapping[int, int],
) -> dict[int, int]:
    """Return the weights after all rules that are other names of a weight, of which one is the owner."""
    item = next(iter(transformed.catalog.tensors))
    groups: dict[int, list[int]] = {}
    owners: dict[int, int] = {}
    for weight, fqn in names.items():
        source = transformed.unchanged((item, fqn))
        if source is not None and transformed.catalog.tensors[item][fqn].numel:
            number = numbers[source[1]]
            owner = tied.get(number, number)
            groups.setdefault(owner, []).append(weight)
            if number == owner:
                owners.setdefault(owner, weight)
    return {
        weight: owners.get(owner, members[0])
        for owner, members in groups.items()
        for weight in members
        if weight != owners.get(owner, members[0])
    }


def _adapter_name(name: str, adapter: str) -> str | None:
    """Return the name of a weight of an adapter in a folder of PEFT; None for one of the model or another.

    PEFT names an adapter between the kind of a weight and the rest: ``q_proj.lora_A.default.weight``.
    """
    parts = name.split(".")
    for place in range(len(parts) - 1, 0, -1):
        if parts[place] != adapter:
            continue
        kind, rest = parts[place - 1], parts[place + 1 :]
        if kind == "modules_to_save":
            return ".".join((*parts[: place - 1], *rest))
        if kind == "lora_magnitude_vector":
            rest = []
        if "_" in kind:
            return ".".join((*parts[:place], *rest))
    return None
