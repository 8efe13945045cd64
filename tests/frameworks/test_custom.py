"""Frameworks of users: their results are checked, and their memory is read and filled."""

from __future__ import annotations

import array
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.errors import StateError, UsageError
from reknit.frameworks import custom
from reknit.frameworks.custom import Held, Value, register_framework, registered
from reknit.frameworks.registry import collect
from tests.frameworks.checkpoint import Checkpoint, load, save
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


@dataclass
class Bag:
    """A value with given things in it."""

    things: list[Any] = field(default_factory=list)
    restored: list[tuple[Any, Any]] = field(default_factory=list)


class Bags:
    """The framework of bags."""

    def matches(self, value: Any) -> bool:
        return isinstance(value, Bag)

    def holdings(self, value: Bag, rank: int, size: int) -> list[Any]:
        return list(value.things)

    def restore(self, value: Bag, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        value.restored.append((list(held), dict(values)))


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered(Bags()):
        yield


class Exported:
    """Memory of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def whole(name: str, memory: Any, dtype: str, shape: tuple[int, ...]) -> Held:
    return Held(name, shape, dtype, (0,) * len(shape), shape, memory)


NUMBERS = torch.arange(6).reshape(2, 3)
KINDS: dict[str, tuple[str, Any, Any]] = {
    "numpy": ("float64", lambda: np.zeros((2, 3)), torch.from_numpy),
    "numpy with strides": ("float32", lambda: np.zeros((3, 4), np.float32).T[:2], torch.from_numpy),
    "torch": ("float32", lambda: torch.zeros(2, 3), torch.detach),
    "torch in half": ("bfloat16", lambda: torch.zeros(2, 3, dtype=torch.bfloat16), torch.detach),
    "torch that trains": ("float32", lambda: torch.zeros(2, 3, requires_grad=True), torch.detach),
    "bytearray": ("bfloat16", lambda: bytearray(12), lambda m: torch.frombuffer(m, dtype=torch.bfloat16)),
    "array": ("int64", lambda: array.array("q", [0] * 6), lambda m: torch.frombuffer(m, dtype=torch.int64)),
    "memoryview": (
        "int32",
        lambda: memoryview(bytearray(24)),
        lambda m: torch.frombuffer(m, dtype=torch.int32),
    ),
    "DLPack": ("float32", lambda: Exported(torch.zeros(2, 3)), lambda m: m.tensor),
}
"""For each kind of memory its dtype, how it is made, and how torch sees it."""


@table("kind", KINDS)
def test_memory_of_every_kind_is_saved_and_filled_in_place(kind: str, tmp_path: Path) -> None:
    dtype, make, seen = KINDS[kind]
    source, memory = make(), make()
    seen(source).copy_(NUMBERS.reshape(seen(source).shape))
    reknit.save(tmp_path / "x", {"bag": Bag([whole("w", source, dtype, (2, 3))])}).result()
    target = Bag([whole("w", memory, dtype, (2, 3))])
    reknit.load(tmp_path / "x", {"bag": target})
    assert torch.equal(seen(memory).reshape(2, 3).long(), NUMBERS)
    assert reknit.open(tmp_path / "x").tensors["bag"]["w"].dtype == dtype
    assert len(target.restored) == 1


def test_boxes_values_levels_and_a_value_that_is_itself_a_tensor() -> None:
    rows = np.arange(8.0).reshape(4, 2)
    bag = Bag(
        [
            Held("layers/w", (4, 2), "float64", (0, 0), (1, 2), rows[:1], (0,)),
            Held("layers/w", (4, 2), "float64", (1, 0), (3, 2), rows[1:]),
            Value("step", 3),
            Value("history", [1, (2, {"a": None})]),
        ]
    )
    state = {"bag": bag, "scale": Bag([whole("", np.ones(2), "float64", (2,))])}
    shards = {(s.item, s.fqn, str(s.box)): s.replicas for s in collect(state, 0, 1).shards}
    assert shards == {
        ("bag", "layers/w", "[0:1,0:2]"): (0,),
        ("bag", "layers/w", "[1:4,0:2]"): None,
        ("scale", "", "[0:2]"): None,
    }
    checkpoint = save(state)
    fresh = np.zeros((4, 2))
    target = Bag([whole("layers/w", fresh, "float64", (4, 2)), Value("step", 0), Value("history", [])])
    load({"bag": target}, checkpoint)
    assert np.array_equal(fresh, rows)
    assert target.restored == [([target.things[0]], {"step": 3, "history": [1, (2, {"a": None})]})]


WRONG: dict[str, tuple[list[Any], str]] = {
    "no Held": ([np.zeros(2)], "returned a ndarray"),
    "no text": ([Value(3, 1)], "used the name 3"),  # type: ignore[arg-type]
    "empty level": ([Value("a//b", 1)], "used the name 'a//b'"),
    "dtype": ([whole("w", np.zeros(2), "double", (2,))], "the dtype 'double'"),
    "outside": ([Held("w", (2,), "float64", (1,), (2,), np.zeros(2))], "put a box at"),
    "dimensions": ([Held("w", (2,), "float64", (0, 0), (2, 1), np.zeros((2, 1)))], "put a box at"),
    "shape": ([whole("w", np.zeros(3), "float64", (2,))], r"float64\[3\] for a box of float64\[2\]"),
    "bytes": ([whole("w", bytearray(24), "float64", (2,))], r"float64\[3\] for a box of float64\[2\]"),
    "other dtype": ([whole("w", np.zeros(2, np.float32), "float64", (2,))], r"float32\[2\] for a box"),
    "no memory": ([whole("w", [0.0, 0.0], "float64", (2,))], "of type list that is not an array"),
    "gaps": (
        [whole("w", memoryview(bytes(32))[::2], "uint8", (16,))],
        "of type memoryview that is not an array",
    ),
    "two specs": (
        [whole("w", np.zeros(2), "float64", (2,)), whole("w", np.zeros(3), "float64", (3,))],
        r"as float64\[2\] and as float64\[3\]",
    ),
    "two things": ([whole("w", np.zeros(2), "float64", (2,)), Value("w", 1)], "the name of two different"),
}


@table("wrong", WRONG)
def test_what_a_framework_gives_is_checked_and_the_refusal_names_it(wrong: str) -> None:
    things, message = WRONG[wrong]
    with pytest.raises(StateError, match=message) as caught:
        collect({"item": {"key": Bag(things)}}, 0, 1)
    assert "item/key" in str(caught.value)
    assert caught.value.remedy
    assert wrong == "two things" or "the framework Bags" in str(caught.value)


def test_read_only_memory_is_saved_and_not_filled() -> None:
    fixed = np.ones(2)
    fixed.flags.writeable = False
    for memory in (fixed, bytes(16)):
        state = {"bag": Bag([whole("w", memory, "float64", (2,))])}
        with pytest.raises(StateError, match="read-only"):
            load(state, save(state))


@table("kind", ["conjugate", "negative"])
def test_a_view_whose_memory_is_not_its_values_is_refused(kind: str) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    memory, dtype = (numbers.conj(), "complex64") if kind == "conjugate" else (numbers.conj().imag, "float32")
    with pytest.raises(StateError, match="a conjugate or negative view"):
        save({"bag": Bag([whole("w", memory, dtype, (2,))])})


def test_restore_is_not_called_for_what_does_not_come(tmp_path: Path) -> None:
    bag = Bag(
        [whole("w", np.ones(3), "float64", (3,)), whole("v", np.ones(2), "float64", (2,)), Value("n", 1)]
    )
    reknit.save(tmp_path / "x", {"bag": bag, "beside": np.ones(1)}).result()
    other = Bag([whole("w", np.zeros(4), "float64", (4,)), whole("u", np.zeros(2), "float64", (2,))])
    reknit.load(tmp_path / "x", {"bag": other, "beside": np.zeros(1)}, strict=False)
    assert other.restored == []
    some = Bag(
        [whole("w", np.zeros(3, np.float32), "float32", (3,)), whole("v", np.zeros(2), "float64", (2,))]
    )
    reknit.load(tmp_path / "x", {"bag": some}, strict=False)
    assert [[one.name for one in held] for held, _ in some.restored] == [["v"]]
    reknit.load(tmp_path / "x", {"bag": some}, strict=False, options=reknit.LoadOptions(cast=True))
    assert [one.name for one in some.restored[1][0]] == ["w", "v"]
    large = Bag([whole("w", np.zeros(4), "float64", (4,))])
    options = reknit.LoadOptions(allow_shape_mismatch=("bag/w",))
    reknit.load(tmp_path / "x", {"bag": large}, strict=False, options=options)
    assert list(large.restored[0][0][0].memory) == [1, 1, 1, 0]


def test_frameworks_are_asked_in_the_order_in_which_they_were_made_known() -> None:
    class Second(Bags):
        def holdings(self, value: Bag, rank: int, size: int) -> list[Any]:
            return [Value("second", True)]

    first, second = Bags(), Second()
    bag = Bag([Value("first", True)])
    before = list(custom.registered_frameworks)
    try:
        register_framework(second)
        register_framework(second)
        register_framework(first)
        assert custom.registered_frameworks[len(before) :] == [second, first]
        # A framework registered by a test comes before.
        assert [blob.fqn for blob in collect({"bag": bag}, 0, 1).blobs] == ["first"]
        with registered(Second()):
            assert [blob.fqn for blob in collect({"bag": bag}, 0, 1).blobs] == ["second"]
    finally:
        custom.registered_frameworks[:] = before


def test_a_custom_framework_is_asked_before_all_others() -> None:
    class Layers(Bags):
        def matches(self, value: Any) -> bool:
            return isinstance(value, (torch.nn.Linear, torch.optim.Optimizer, np.ndarray, int))

        def holdings(self, value: Any, rank: int, size: int) -> list[Any]:
            return [Value(type(value).__name__, True)]

    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    with registered(Layers()):
        found = collect({"m": layer, "o": optimizer, "more": {"a": np.ones(2), "n": 3}}, 0, 1)
    assert found.shards == ()
    assert {(blob.item, blob.fqn) for blob in found.blobs} == {
        *{("m", "Linear"), ("o", "SGD"), ("more", "a/ndarray"), ("more", "n/int")}
    }


@table(("what", "message"), [(object(), "object has no matches"), (Bags, "is a class and not an object")])
def test_what_is_no_framework_is_refused(what: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message), registered(what):
        pass
    with pytest.raises(UsageError, match=message):
        register_framework(what)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, entry: str) -> None:
    """Put a distribution with one entry point where Python finds it."""
    (folder / "acme_bags.py").write_text(module)
    metadata = folder / "acme_bags-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-bags\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[reknit.frameworks]\nbags = {entry}\n")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "acme_bags", raising=False)
    custom.installed_frameworks.cache_clear()


@pytest.fixture
def installing(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    custom.installed_frameworks.cache_clear()


MODULE = """
from reknit.frameworks.custom import Value

class Sack:
    pass

class Sacks:
    made = 0
    def __init__(self):
        type(self).made += 1
    def matches(self, value):
        return isinstance(value, Sack)
    def holdings(self, value, rank, size):
        return [Value("weight", 3)]
    def restore(self, value, held, values):
        value.weight = values["weight"]

ready = Sacks()
"""


@table("entry", ["acme_bags:Sacks", "acme_bags:ready"])
def test_an_installed_framework_is_found_and_loaded_once(
    entry: str, tmp_path: Path, installing: pytest.MonkeyPatch
) -> None:
    install(tmp_path, installing, MODULE, entry)
    import acme_bags  # type: ignore[import-not-found]

    made = acme_bags.Sacks.made
    for _ in range(3):
        checkpoint: Checkpoint = save({"sack": acme_bags.Sack()})
    assert checkpoint.shared == {("sack", "weight"): 3}
    sack = acme_bags.Sack()
    load({"sack": sack}, checkpoint)
    assert sack.weight == 3
    assert acme_bags.Sacks.made == made + (entry == "acme_bags:Sacks")


@table(
    ("module", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        ("", "AttributeError"),
        ("class Sacks:\n    def __init__(self): raise OSError('no')", "OSError: no"),
        ("class Sacks:\n    pass", "Sacks has no matches"),
    ],
)
def test_objects_of_a_framework_that_cannot_be_loaded_are_refused_and_no_others(
    module: str,
    message: str,
    tmp_path: Path,
    installing: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.clear()
    install(tmp_path, installing, module, "acme_bags:Sacks")
    sack = type("Sack", (), {"__module__": "acme_bags", "state_dict": dict})()
    for _ in range(2):
        assert len(collect({"n": 1}, 0, 1).blobs) == 1
        with pytest.raises(UsageError, match=message) as caught:
            collect({"sack": sack}, 0, 1)
        assert "the distribution acme-bags brings 'bags'" in str(caught.value)
        assert caught.value.remedy
    (line,) = caplog.messages
    assert "acme-bags" in line
