"""`reknit diff` compares two checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.cli.output import print_json, printable
from reknit.format.blob_codec import decode_blobs, encode_blobs
from reknit.integrations.formats.export import stream, tensors_of
from reknit.integrations.formats.states import Beside, is_note, plain_values, said_once, topmost
from reknit.options import MIB, LoadOptions
from reknit.plugins.events import amount
from reknit.plugins.format import full_name, opened, read_opened

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from reknit.plugins.format import OpenCheckpoint, TensorSpec

_PIECE_NBYTES = 16 * MIB
_SLICE_NUMEL = 1 << 19
"""Elements whose differences are computed at once, each as a double-precision number."""

_NO_NUMBERS = frozenset({"complex32", "float4_e2m1fn_x2"})
"""Floating types without arithmetic in NumPy."""


_NOTHING: tuple[Any, ...] = ({}, [])
_EMPTY = frozenset(encode_blobs({"": value}, allow_pickle=False) for value in _NOTHING)
"""Values without contents, for which some formats have no place."""

_SHOWN = 60
"""Letters that are shown of a value."""
_SHOWN_NBYTES = MIB
"""A larger value is not shown."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference, described by `what`.

    Its `kind` is ``"item"``, ``"tensor"``, ``"value"``, ``"data"``, or ``"unread"`` for an entry that reknit
    cannot read: a tensor, a value, or an item.
    """

    kind: str
    name: str
    what: str


@dataclass
class DataDifference:
    """How the elements of a tensor differ between two checkpoints.

    `largest` is the largest absolute difference of two floating numbers that are not NaN, or None.  `squares`
    are the sums of the squares of A, of B, and of their difference, without NaNs; None if they are not asked.
    """

    numel: int = 0
    nans: int = 0
    largest: float | None = None
    squares: list[float] | None = None

    def __str__(self) -> str:
        facts = [f"{self.numel} {'element differs' if self.numel == 1 else 'elements differ'}"]
        if self.largest is not None:
            facts.append(f"largest absolute difference {self.largest:g}")
        if self.nans:
            facts.append(f"{self.nans} with a NaN")
        if (norms := self.norms()) is not None:
            facts.append(
                f"norms {norms['a']:g} and {norms['b']:g}, of the difference {norms['difference']:g}"
            )
        return ", ".join(facts)

    def norms(self) -> dict[str, float] | None:
        """Return the Euclidean norms of A, of B and of their difference, None if they are not asked."""
        if self.squares is None:
            return None
        return dict(zip(("a", "b", "difference"), (one**0.5 for one in self.squares), strict=True))

    def add(self, a: NDArray[Any], b: NDArray[Any], spec: TensorSpec) -> None:
        """Compare a piece, bit by bit."""
        for start in range(0, len(a), _SLICE_NUMEL):
            one, two = a[start : start + _SLICE_NUMEL], b[start : start + _SLICE_NUMEL]
            differs = _unequal(one, two)
            if self.squares is not None and spec.dtype not in _NO_NUMBERS:
                self._add_squares(one, two, spec)
            if differs.any():
                self.numel += int(differs.sum())
                if spec.dtype.startswith(("float", "bfloat", "complex")) and spec.dtype not in _NO_NUMBERS:
                    self._measure(one[differs], two[differs], spec)

    def _add_squares(self, a: NDArray[Any], b: NDArray[Any], spec: TensorSpec) -> None:
        assert self.squares is not None
        wide = np.complex128 if spec.dtype.startswith("complex") else np.float64
        one, two = a.astype(wide), b.astype(wide)
        with np.errstate(all="ignore"):
            for number, values in enumerate((one, two, one - two)):
                self.squares[number] += float(np.nansum(np.square(np.abs(values))))

    def _measure(self, a: NDArray[Any], b: NDArray[Any], spec: TensorSpec) -> None:
        wide = np.complex128 if spec.dtype.startswith("complex") else np.float64
        with np.errstate(all="ignore"):
            distance = np.abs(a.astype(wide) - b.astype(wide))
        known = distance[~np.isnan(distance)]
        self.nans += len(distance) - len(known)
        if len(known):
            self.largest = max(self.largest or 0.0, float(known.max()))


@dataclass
class Comparison:
    """Two checkpoints beside each other; `differences` fills up as more is compared."""

    a: OpenCheckpoint
    b: OpenCheckpoint
    differences: list[Difference] = field(default_factory=list)
    norms: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, kind: str, name: str, what: str) -> None:
        """Add a difference."""
        self.differences.append(Difference(kind, name, what))

    def items(self) -> list[str]:
        """Compare the items, and return the common ones.  Values of each rank make no difference."""
        sides = self.a.manifest.items, self.b.manifest.items
        for name, side, others in (("A", self.a, sides[1]), ("B", self.b, sides[0])):
            for item in side.manifest.items:
                if item not in others and not _only_own(side, item):
                    self.note("item", item, f"only in {name}")
        for name, side in (("A", self.a), ("B", self.b)):
            for entry in side.manifest.unread:
                self.note("unread", entry.name, f"not compared: of {name}, {entry.why}")
        return [item for item in sides[0] if item in sides[1]]

    def own(self) -> list[str]:
        """Return the items for which ranks saved values of their own, in A or in B."""
        files = (*self.a.manifest.blobs, *self.b.manifest.blobs)
        return list(dict.fromkeys(file.item for file in files if file.coordinate is not None))

    def specs(self, items: list[str]) -> list[tuple[int, int]]:
        """Compare names, shapes and dtypes; return the numbers of the equal tensors, in A and in B."""
        sides = [
            {key: n for key, n in side.index.ids.items() if key[0] in items} for side in (self.a, self.b)
        ]
        names = [{full_name(item, fqn): n for (item, fqn), n in side.items()} for side in sides]
        beside = Beside.of(*names)
        for side, only in (("A", beside.only_a), ("B", beside.only_b)):
            for name in only:
                self.note("tensor", name, f"only in {side}")
        pairs = []
        for name, other in beside.pairs.items():
            numbers = names[0][name], names[1][other]
            one, two = (side.index.tensors[n].spec for side, n in zip((self.a, self.b), numbers, strict=True))
            if one == two:
                pairs.append(numbers)
            else:
                self.note("tensor", name, f"{one} in A, {two} in B")
        return pairs

    def values(self, items: list[str]) -> int:
        """Compare the values that all ranks share, and return how many both have."""
        one, two = (_values(side, items) for side in (self.a, self.b))
        a, b = _encoded(items, one, two), _encoded(items, two, one)
        beside = Beside.of(a, b)
        found = []
        for side, only, here, there, other in (
            ("A", beside.only_a, a, b, self.b),
            ("B", beside.only_b, b, a, self.a),
        ):
            names = [name for name in only if here[name] not in _EMPTY and not is_note(name)]
            known = (*there, *(full_name(*key) for key in other.index.ids))
            found += [(name, f"only in {side}") for name in topmost(names, known)]
        for name, same in beside.pairs.items():
            if a[name] != b[same]:
                one_text, other_text = both_shown(a[name], b[same])
                found.append((name, f"{one_text} in A, {other_text} in B"))
        for name, what in said_once(found):
            self.note("value", name, what)
        return len(beside.pairs)

    def data(self, pairs: list[tuple[int, int]], *, norms: bool = False) -> None:
        """Compare the bytes of these tensors, reading both sides piece by piece; compute `norms` if asked."""
        found: dict[int, DataDifference] = {}
        streams = (
            stream(self.a, [a for a, _ in pairs], _PIECE_NBYTES),
            stream(self.b, [b for _, b in pairs], _PIECE_NBYTES),
        )
        for (number, one), (_, two) in zip(*streams, strict=True):
            if number not in found:
                found[number] = DataDifference(squares=[0.0, 0.0, 0.0] if norms else None)
            found[number].add(one, two, self.a.index.tensors[number].spec)
        for number, difference in found.items():
            entry = self.a.index.tensors[number]
            name = full_name(entry.item, entry.fqn)
            if difference.numel:
                self.note("data", name, f"{difference} (of {entry.spec.numel})")
            if (lengths := difference.norms()) is not None:
                self.norms[name] = lengths

    def summary(self, num_same: int) -> dict[str, int]:
        """Return the number of tensors with equal specs, and that of the differences of each kind."""
        counts = Counter(difference.kind for difference in self.differences)
        kinds = ("item", "tensor", "value", "data", "unread")
        return {"compared": num_same, **{kind: counts[kind] for kind in kinds}}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints, of reknit or of other programs",
        description="Compare the items, the tensors' names, shapes and dtypes, and the shared values of two "
        "checkpoints, each of any format that reknit opens.  Their sharding, steps, metadata and per-rank "
        "values are not compared, nor the form in which a format keeps a value.",
    )
    parser.add_argument("a", metavar="A", help="a checkpoint: a folder or URL")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--data", action="store_true", help="compare the tensors' bytes too")
    parser.add_argument(
        "--norms", action="store_true", help="also compute the norms of all tensors, and of their differences"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, and return the exit code."""
    with tensors_of(args.a) as a, tensors_of(args.b) as b:
        comparison = Comparison(a, b)
        items = comparison.items()
        pairs = comparison.specs(items)
        skipped = a.manifest.uses_pickle or b.manifest.uses_pickle
        num_values = None if skipped else comparison.values(items)
        if args.data or args.norms:
            comparison.data(pairs, norms=args.norms)
    _print(args, comparison, len(pairs), num_values)
    return 1 if comparison.differences else 0


def _unequal(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the elements whose bits differ: -0.0 is not 0.0, and a NaN equals itself."""
    itemsize = a.dtype.itemsize
    if itemsize <= 8:
        return np.asarray(a.view(f"u{itemsize}") != b.view(f"u{itemsize}"))
    return np.asarray((a.view("u8") != b.view("u8")).reshape(len(a), -1).any(axis=1))


def both_shown(a: bytes, b: bytes) -> tuple[str, str]:
    """Return two different values, each encoded alone, as short texts around their first difference."""
    if max(len(a), len(b)) > _SHOWN_NBYTES:
        return f"a value of {amount(len(a))}", f"one of {amount(len(b))}"
    ((one,), (two,)) = ([repr(value) for value in decode_blobs(data).values()] for data in (a, b))
    same = next(
        (n for n, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two))
    )
    start = max(0, same - _SHOWN // 4)
    return _cut(one, start), _cut(two, start)


def _cut(text: str, start: int) -> str:
    """Return a part of a text, with dots in place of longer parts that are left out."""
    start = 0 if start <= 3 else start
    end = start + _SHOWN
    before, after = "..." if start else "", "..." if len(text) > end + 3 else text[end:]
    return f"{before}{text[start:end]}{after}"


def _values(checkpoint: OpenCheckpoint, items: list[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the shared values by item and name."""
    storage = checkpoint.storage
    if checkpoint.manifest.other is not None:  # it was read as a whole, with its warnings
        return checkpoint.blobs
    return opened(storage, read_opened(storage, items), None, LoadOptions()).blobs


def _encoded(
    items: list[str], values: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]
) -> dict[str, bytes]:
    """Return the leaves of values by name, encoded, so that values of all types can be compared."""
    return {
        full_name(item, path): encode_blobs({"": value}, allow_pickle=False)
        for item in items
        for path, value in plain_values(values[item], others[item]).items()
    }


def _only_own(checkpoint: OpenCheckpoint, item: str) -> bool:
    """Return whether an item has values of each rank, and nothing that ranks share."""
    places = [file.coordinate for file in checkpoint.manifest.blobs if file.item == item]
    return bool(places) and None not in places and all(key[0] != item for key in checkpoint.index.ids)


def _print(args: argparse.Namespace, comparison: Comparison, num_same: int, num_values: int | None) -> None:
    differences, own = comparison.differences, comparison.own()
    if args.json:
        print_json(
            {
                "a": comparison.a.storage.url,
                "b": comparison.b.storage.url,
                "data_compared": args.data or args.norms,
                "values_compared": num_values is not None,
                "of_each_rank": own,
                "differences": [asdict(difference) for difference in differences],
                "summary": comparison.summary(num_same),
                "norms": comparison.norms,
            }
        )
        return
    for difference in differences:
        print(f"{difference.kind} {printable(difference.name)}: {printable(difference.what)}")
    if num_values is None:
        print("values were not compared: a checkpoint holds pickled ones")
    for name, norms in comparison.norms.items():
        sides = f"{norms['a']:g}, {norms['b']:g}"
        print(f"norms {printable(name)}: {sides}, of the difference {norms['difference']:g}")
    data = args.data or args.norms
    if differences:
        print(_counted(comparison.summary(num_same), data=data))
    else:
        compared = (
            "names, shapes, dtypes and bytes" if data else "names, shapes, dtypes; --data compares bytes"
        )
        values = "" if num_values is None else f", {_number(num_values, 'value')}"
        print(f"equal: {_number(num_same, 'tensor')} ({compared}){values}")
    if own:
        print(f"note: values of each rank were not compared ({printable(', '.join(own))})")


def _counted(counts: dict[str, int], *, data: bool) -> str:
    bytes_text = f", {counts['data']} of {counts['compared']} in their bytes" if data else ""
    unread = f", {counts['unread']} not compared" if counts["unread"] else ""
    return (
        f"differences: {counts['item']} items, {counts['tensor']} tensors in name, shape or dtype, "
        f"{counts['value']} values{bytes_text}{unread}"
    )


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
