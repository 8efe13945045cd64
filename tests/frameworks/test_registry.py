"""States of plain Python, NumPy and torch values, without modules."""

from __future__ import annotations

import subprocess
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from reknit.errors import FormatError, StateError
from reknit.frameworks.neutral import from_neutral, to_neutral
from reknit.frameworks.registry import collect, wanted
from reknit.types.manifest import Catalog
from reknit.types.shard import Alias, Tagged
from reknit.types.wanted import RESIZE
from tests.frameworks.checkpoint import load, save
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Pair(NamedTuple):
    left: Any
    right: Any


def test_names_follow_keys_and_indexes() -> None:
    t = torch.ones(2)
    state = {
        "a": t,
        "b": {"a.b": 1, "c": {"d": 2}, 3: [t, 4], "3": 5, "x/y~": {}},
        "c": [1, 2, {"e": 3}],
        "d": (),
        "e": {},
    }
    held = collect(state, 0, 1)
    entries: list[Any] = [*held.shards, *held.blobs]
    assert {f"{one.item}:{one.fqn}" for one in entries} == {
        "a:", "b:a.b", "b:c/d", "b:3/0", "b:3/1", "b:~23", "b:x~1y~0", "c:", "d:", "e:",
    }  # fmt: skip
    assert held.items == ("a", "b", "c", "d", "e")


def test_a_state_is_filled_where_it_is_and_not_before_delivery() -> None:
    def make(fill: float, history: list[int]) -> dict[str, Any]:
        return {
            "step": int(fill),
            "mean": np.full(3, fill),
            "nested": {
                "t": torch.full((2, 2), fill),
                "pair": (torch.full((1,), fill), fill, Pair(fill, torch.full((1,), fill))),
            },
            "history": {"losses": history, "best": fill or None, 7: [torch.ones(1) * fill, "x" * int(fill)]},
            "scalar": np.float32(fill),
        }

    def live(state: dict[str, Any]) -> list[int]:
        nested = state["nested"]
        places = (state["mean"], nested, nested["t"], state["history"]["losses"], nested["pair"][0])
        return [id(one) for one in places]

    target, checkpoint = make(0, []), save(make(3, [1, 2, 3]))
    before = live(target)
    wanted(target, checkpoint.catalog(), 0, 1)
    assert repr(target) == repr(make(0, []))
    load(target, checkpoint)
    assert repr(target) == repr(make(3, [1, 2, 3]))
    assert live(target) == before
    assert type(target["nested"]["pair"][2]) is Pair


def test_what_the_checkpoint_lacks_is_missing_and_other_shapes_are_mismatched() -> None:
    saved = {"t": torch.ones(2), "shape": torch.ones(2), "v": 1, "kind": 1, "dnik": torch.ones(1)}
    target = {"t": torch.ones(2), "shape": torch.ones(3), "u": torch.ones(1), "w": 2, "kind": torch.ones(1)}
    target["dnik"] = 1
    want = wanted({"i": target}, save({"i": saved}).catalog(), 0, 1)
    assert [fqn for _, fqn, _ in want.missing] == ["w", "u"]
    assert {fqn: why for _, fqn, why in want.mismatched} == {
        "shape": f"its shape is [2] in the checkpoint and [3] here{RESIZE}",
        "kind": "it is a plain value in the checkpoint and a tensor in the target",
        "dnik": "it is a tensor in the checkpoint and a plain value in the target",
    }
    assert [shard.fqn for shard in want.shards] == ["t"]


def test_a_value_that_differed_between_ranks_goes_back_to_as_many_ranks() -> None:
    own = {0: {"v": 10}, 1: {"v": 11}}
    catalog = Catalog(
        ("i",),
        {"i": {}},
        {"i": {}},
        {"i": ({"rank": 0}, {"rank": 1})},
        lambda item, place: own[place["rank"]],
    )
    target = {"i": {"v": 0}}
    want = wanted(target, catalog, 1, 2)
    want.deliver()
    assert target == {"i": {"v": 11}}
    assert (want.blobs, want.missing) == ((), ())
    for rank, size in ((0, 1), (0, 4), (3, 4)):
        (entry,) = wanted(target, catalog, rank, size).missing
        assert entry[:2] == ("i", "v")
        assert f"differed between the 2 ranks that saved it, and this job has {size}" in entry[2]
        assert "PerRank" in entry[2]


def test_the_same_memory_under_two_names_is_stored_once() -> None:
    t = torch.ones(4)
    held = collect({"a": {"x": t, "y": t.view(4), "half": t[:2]}, "b": t}, 0, 1)
    assert [(s.item, s.fqn) for s in held.shards] == [("a", "x"), ("a", "half"), ("b", "")]
    assert held.aliases == (Alias("a", "y", "x"),)


def test_replicas_are_unknown_for_plain_tensors_of_several_ranks() -> None:
    state = {"t": torch.ones(2), "n": np.ones(2)}
    assert [s.replicas for s in collect(state, 1, 2).shards] == [None, None]
    assert [s.replicas for s in collect(state, 0, 1).shards] == [(0,), (0,)]


@given(arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 4))), st.booleans(), st.booleans())
def test_arrays_of_any_strides_are_viewed_not_copied(array: Any, flip: bool, transpose: bool) -> None:
    view = array[::-1] if flip else array
    view = view.T if transpose else view
    (shard,) = collect({"a": view}, 0, 1).shards
    assert shard.data.__array_interface__ == view.__array_interface__


@table(
    "tensor",
    [torch.ones(3, dtype=torch.complex64).conj(), (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag],
)
def test_conjugated_and_negated_views_are_saved_and_filled_as_their_values(tensor: torch.Tensor) -> None:
    assert tensor.is_conj() or tensor.is_neg()
    value = tensor.resolve_conj().resolve_neg() * 3
    load({"t": tensor}, save({"t": value}))
    assert torch.equal(tensor, value)
    (shard,) = collect({"t": tensor}, 0, 1).shards
    assert shard.data.numpy().tolist() == value.tolist()


class Hidden(torch.Tensor):
    """A tensor whose memory is not its values."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Hidden:
        made: Hidden = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


@pytest.mark.filterwarnings("ignore")
@table(
    ("make", "why"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo tensor"),
        (lambda: torch.empty(2, device="meta"), "to_empty"),
        (lambda: np.ma.masked_array([1.0], [True]), "masked array"),
        (torch.nn.UninitializedParameter, "not initialised"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "nested tensor",
        ),
        (lambda: Hidden(torch.ones(2)), "keeps its values somewhere else"),
        (lambda: {None: 1}, "has the key None"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
    ],
)
def test_what_has_no_bytes_of_its_own_is_refused_with_its_place(make: Any, why: str) -> None:
    value = make()
    state = {"item": {"deep": [value, torch.ones(1)]}}
    looks: list[Callable[[], object]] = [
        lambda: collect(state, 0, 1),
        lambda: wanted(state, save({"item": 1}).catalog(), 0, 1),
    ]
    for look in looks[: 1 if why == "to_empty" else 2]:  # a load gives memory to a meta tensor
        with pytest.raises(StateError, match=why) as error:
            look()
        assert "item/deep/0" in str(error.value)


@table(
    ("state", "why"),
    [
        ({"a": np.broadcast_to(np.ones(1), 3)}, "read-only"),
        ({"a": torch.ones(1).expand(3)}, "expanded"),
        (MappingProxyType({"a": 1}), "cannot be changed"),
        ({"a": MappingProxyType({"b": 1})}, "cannot be changed"),
        ({"a": MappingProxyType({"b": (1, torch.ones(1))})}, "cannot be changed"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_changes(state: Any, why: str) -> None:
    checkpoint = save(state)
    with pytest.raises(StateError, match=why):
        wanted(state, checkpoint.catalog(), 0, 1)


@table("state", [[1], {1: 2}, {"": 1}])
def test_a_state_is_a_mapping_of_named_items(state: Any) -> None:
    with pytest.raises(StateError):
        collect(state, 0, 1)


def test_conjugated_tensors_inside_values_are_their_values() -> None:
    value = torch.tensor([1 + 2j]).conj()
    assert from_neutral(to_neutral([value], "here"))[0].tolist() == [1 - 2j]
    assert from_neutral(to_neutral([value.imag], "here"))[0].tolist() == [-2]


@table(
    "hostile",
    [
        Tagged("torch.dtype", "Tensor"),
        Tagged("torch.dtype", "__dict__"),
        Tagged("torch.device", "no such"),
        Tagged("torch.tensor", {"dtype": "float32", "shape": [2], "data": b"123"}),
        Tagged("torch.tensor", {"dtype": "float32", "shape": [-1, -1], "data": b"1234"}),
        Tagged("torch.tensor", {"dtype": "nothing", "shape": [], "data": b""}),
        Tagged("torch.tensor", 3),
        Tagged("unheard.of", 3),
    ],
)
def test_a_damaged_value_is_a_format_error(hostile: Tagged) -> None:
    with pytest.raises(FormatError):
        from_neutral([hostile])


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "torch":
            raise ImportError("blocked")
sys.meta_path.insert(0, Blocked())
import numpy as np
import reknit
class Sampler:
    def state_dict(self): return {"seen": 3, "order": np.arange(2)}
    def load_state_dict(self, state): self.state = state
state = {"a": {"w": np.ones(3), "n": [1]}, "s": Sampler(), "r": reknit.RngState()}
reknit.save(sys.argv[1], state)
state["a"] = {"w": np.zeros(3), "n": []}
reknit.load(sys.argv[1], state)
assert state["a"]["n"] == [1] and state["a"]["w"].tolist() == [1, 1, 1]
assert state["s"].state["seen"] == 3 and state["s"].state["order"].tolist() == [0, 1]
assert "torch" not in sys.modules
print("done")
"""


def test_states_without_torch_are_saved_where_torch_is_not_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
