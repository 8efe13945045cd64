"""Targets in which one place in memory is two elements, and tensors that are one in the target only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor

import reknit
from reknit import transforms
from reknit.engine.loading import collect
from reknit.errors import MismatchError, StateError
from reknit.frameworks.registry import wanted
from reknit.frameworks.walk import overlap
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.shard import Shard, Strided, TensorSpec
from tests.devices import every_device
from tests.frameworks.checkpoint import load, save
from tests.ranks import run
from tests.running.examples import examples
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


@settings(max_examples=examples(300))
@given(st.data())
def test_an_array_is_distinct_when_each_element_has_a_place_of_its_own(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [data.draw(st.integers(0, 7)) for _ in shape]
    signs = [data.draw(st.sampled_from((1, -1))) for _ in shape]
    places = sum(np.meshgrid(*(np.arange(n) * s for n, s in zip(shape, strides, strict=True)), indexing="ij"))
    true = np.unique(places).size == np.prod(shape, dtype=int)
    assert overlap.is_distinct(shape, [s * f for s, f in zip(strides, signs, strict=True)]) == true


@settings(max_examples=examples(200))
@given(st.data())
def test_shards_share_memory_when_numpy_says_so(data: st.DataObject) -> None:
    memory = np.zeros(64, np.uint8)
    shards, arrays = [], []
    for number in range(data.draw(st.integers(2, 5))):
        array = memory[data.draw(st.integers(0, 40)) :][:24]
        kind = data.draw(st.sampled_from(("plain", "columns", "backwards", "strided", "empty")))
        if kind == "columns":
            first = data.draw(st.integers(0, 2))
            array = array.reshape(6, 4)[:, first : first + 2]
        elif kind == "backwards":
            array = array[:: -data.draw(st.integers(1, 3))]
        elif kind == "empty":
            array = array[:0]
        held: Any = array
        if kind == "strided":
            first = data.draw(st.integers(0, 40))
            held = Strided(torch.from_numpy(memory)[1:], (3, 2), (8, 2), first)
            array = as_strided(memory[1 + first :], (3, 2), (8, 2))
        name = data.draw(st.sampled_from(("a", "b", f"own {number}")))
        shards.append(Shard("m", name, TensorSpec(array.shape, "uint8"), Box.whole(array.shape), None, held))
        arrays.append(array)
    shared = any(
        np.shares_memory(arrays[n], arrays[m]) and shards[n].fqn != shards[m].fqn
        for n in range(len(arrays))
        for m in range(n)
    )
    groups = overlap.overlapping(shards)
    assert bool(groups) == shared
    apart = set(range(len(shards))) - {number for group in groups for number in group}
    assert not any(
        np.shares_memory(arrays[n], arrays[m]) and shards[n].fqn != shards[m].fqn
        for n in apart
        for m in range(len(shards))
    )
    before = memory.tobytes()
    if groups:
        beside = overlap.FilledBeside(shards, groups)
        beside.require_agreement()
        filled, agree = [beside.shards.get(id(shard), shard) for shard in shards], True
        for group in groups:
            rows = np.full(64, -1)
            for n in group:
                assert not np.shares_memory(np.asarray(filled[n].data), arrays[n])
                filled[n].data[...] = torch.arange(arrays[n].size).reshape(arrays[n].shape)
                first = arrays[n].__array_interface__["data"][0] - memory.ctypes.data
                view = as_strided(rows[first:], arrays[n].shape, [step * 8 for step in arrays[n].strides])
                mine = np.arange(arrays[n].size).reshape(arrays[n].shape)
                agree &= bool(((view == -1) | (view == mine)).all())
                view[...] = mine
        if agree:
            beside.require_agreement()
        else:
            with pytest.raises(StateError, match="share memory in the target, and differ"):
                beside.require_agreement()
    assert memory.tobytes() == before


BASE = torch.zeros(4, 6)
SHARING: dict[str, Any] = {
    "a view and a part of it": {"a": BASE, "b": BASE[1]},
    "two forms of one tensor": {"a": BASE, "b": BASE.view(-1)},
    "two parts that meet": {"a": BASE[:, :4], "b": BASE[:, 3:]},
    "other bytes of one memory": {"a": BASE.view(torch.int32)[0], "b": BASE.view(torch.int16)[0, 11:]},
    "one between": {"a": BASE.view(-1)[::2], "c": BASE.view(-1)[1:2], "b": BASE.view(-1)[4:5]},
    "a tensor and its array": {"a": BASE, "b": BASE.numpy()},
    "arrays": {"a": BASE.numpy()[:2], "b": BASE.numpy()[1:]},
}


def _shared(parts: Any, items: int) -> Any:
    return {"m": parts} if items == 1 else {name: {"x": part} for name, part in parts.items()}


@table("parts", SHARING.values())
@table("items", [1, 2])
def test_tensors_that_share_memory_in_part_are_loaded_if_they_agree_and_else_refused(
    parts: Any, items: int
) -> None:
    state = _shared(parts, items)
    BASE.copy_(torch.randn(4, 6))
    BASE[0, 0], BASE[3, 5] = float("nan"), -0.0
    true = [np.asarray(part).tobytes() for part in parts.values()]
    checkpoint = save(state)
    BASE.zero_()
    load(state, checkpoint)
    assert [np.asarray(part).tobytes() for part in parts.values()] == true
    BASE.zero_()
    for number, (name, tensor) in enumerate(checkpoint.tensors.items()):
        checkpoint.tensors[name] = torch.full_like(tensor, number)
    with pytest.raises(StateError, match=r"[abc].* and .*[bc].* share memory in the target, and diff"):
        load(state, checkpoint)
    assert not BASE.any()


@every_device
def test_tensors_of_devices_share_memory_only_where_their_storages_do(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = f"{device_type}:{torch.get_device_module(device_type).device_count() - 1}"
    target = {
        "m": {n: torch.zeros(4, 6, device=d) for n, d in (("a", device_type), ("b", last), ("c", last))}
    }
    checkpoint = save({"m": {name: torch.full((4, 6), float(n)) for n, name in enumerate("abc")}})
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 64)  # as MPS, where an address is an object's
    load(target, checkpoint)
    assert [tensor[3, 5].item() for tensor in target["m"].values()] == [0, 1, 2]
    base = torch.zeros(4, 6, device=last)
    shared = {"m": {"a": base[:, :4], "b": base[:, 3:]}}
    apart = save({"m": {name: torch.full(tensor.shape, 5.0) for name, tensor in shared["m"].items()}})
    load(shared, apart)
    assert base.eq(5).all()
    apart.tensors["m", "b"] = torch.zeros(4, 3)
    with pytest.raises(StateError, match="m/a and m/b share memory in the target, and differ"):
        load(shared, apart)
    assert base.eq(5).all()


class Tied(nn.Module):
    """A weight tied to its transpose, and a view of a larger buffer that is a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)
        self.down.weight = nn.Parameter(self.up.weight.detach().t())
        self.register_buffer("table", torch.randn(6, 2))
        self.register_buffer("row", self.get_buffer("table")[2])


def test_a_module_with_a_transposed_weight_and_a_view_of_a_buffer_comes_back(tmp_path: Path) -> None:
    source, target = Tied(), Tied()
    reknit.save(tmp_path / "x", {"m": source})
    reknit.load(tmp_path / "x", {"m": target})
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
    assert target.down.weight.data_ptr() == target.up.weight.data_ptr()
    with torch.no_grad():
        source.down.weight = nn.Parameter(source.down.weight + 1)
    reknit.save(tmp_path / "y", {"m": source})
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(StateError, match=r"m/up.weight and m/down.weight share memory in the target"):
        reknit.load(tmp_path / "y", {"m": target})
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    report = reknit.load(tmp_path / "y", {"m": target}, options=reknit.LoadOptions(only=("m/up.*",)))
    assert report is not None
    assert torch.equal(target.down.weight, source.up.weight.t())


def test_tensors_that_share_memory_are_not_compared_where_one_is_left_as_it_is(tmp_path: Path) -> None:
    flat = torch.zeros(6)
    reknit.save(tmp_path / "x", {"a": torch.ones(6), "b": torch.ones(2, dtype=torch.float64)})
    report = reknit.load(tmp_path / "x", {"a": flat, "b": flat[:2]}, strict=False)
    assert list(report.mismatched) == ["b"]
    assert flat.tolist() == [1] * 6
    reknit.load(tmp_path / "x", {"a": flat, "b": flat[:2]}, options=reknit.LoadOptions(cast=True))
    options = reknit.LoadOptions(cast=True, allow_shape_mismatch=("b",))
    with pytest.raises(StateError, match=r"a and b share memory and .* another shape"):
        reknit.load(tmp_path / "x", {"a": flat, "b": flat[:3]}, options=options)


def test_parts_that_lie_between_each_other_are_filled() -> None:
    flat = torch.zeros(4, 6)
    target: dict[str, Any] = {
        "left": flat[:, :3],
        "right": flat[:, 3:],
        "array": np.zeros(6)[::2],
        "none": flat[:0],
    }
    load({"m": target}, save({"m": {name: part + n for n, (name, part) in enumerate(target.items())}}))
    assert flat.tolist() == [[0, 0, 0, 1, 1, 1]] * 4
    tangled, saved = torch.zeros(11).as_strided((3, 3), (3, 2)), torch.arange(9.0).reshape(3, 3)
    load({"m": tangled}, save({"m": saved}))
    assert torch.equal(tangled, saved)


@table(
    "target",
    [
        torch.zeros(10).as_strided((4, 3), (2, 1)),
        torch.zeros(12).as_strided((2, 4), (4, 2)),
        as_strided(np.zeros(10), (4, 3), (16, 8)),
        as_strided(np.zeros(10), (4, 3), (0, 8)),
    ],
)
def test_a_target_that_overlaps_itself_is_refused(target: Any) -> None:
    checkpoint = save({"m": {"a": target}})
    with pytest.raises(StateError, match=r"m/a is an .*overlapping .*: several of its elements share memory"):
        wanted({"m": {"a": target}}, checkpoint.catalog(), 0, 1)


TIED = torch.zeros(5)


@pytest.mark.parametrize(
    "target", [{"m": {"a": TIED, "b": TIED}}, {"m": {"a": TIED}, "n": {"b": TIED}}], ids=["one", "two"]
)
def test_a_tensor_that_is_one_here_is_filled_where_it_is_equal_in_the_checkpoint(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "BATCH_NBYTES", 8)  # so that the tensors are compared in several parts
    second = "m/b" if len(target) == 1 else "n/b"
    for number in range(2):
        values = [torch.arange(5.0), torch.arange(5.0)]
        values[1][4] += number
        apart = {item: {name: values[name == "b"] for name in inner} for item, inner in target.items()}
        reknit.save(tmp_path / f"{number}", apart)
    TIED.fill_(7)
    with pytest.raises(MismatchError, match=f"mismatched: {second}: it differs from m/a in the checkpoint"):
        reknit.load(tmp_path / "1", target)
    assert TIED.tolist() == [7] * 5
    report = reknit.load(tmp_path / "0", target)
    assert TIED.tolist() == [0, 1, 2, 3, 4]
    assert (report.notes, report.mismatched) == ({}, {})
    report = reknit.load(tmp_path / "1", target, strict=False)
    assert TIED.tolist() == [0, 1, 2, 3, 4]
    assert list(report.mismatched) == [second]


def test_tensors_of_two_kinds_are_not_one_here(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"a": torch.ones(5), "b": torch.ones(5, dtype=torch.float64)})
    with pytest.raises(MismatchError, match=r"b: it is float64\[5\] in the checkpoint, and a, "):
        reknit.load(tmp_path / "x", {"a": TIED, "b": TIED})


def test_a_tie_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"a": torch.ones(2), "b": torch.zeros(2)})

    def rank(group: Group) -> str:
        one, other = torch.full((2,), 7.0), torch.full((2,), 7.0)
        state = {"a": one, "b": one if group.rank else other}
        with pytest.raises(MismatchError) as caught:
            reknit.load(tmp_path / "x", state, group=group)
        assert one.tolist() == other.tolist() == [7, 7]
        return str(caught.value)

    first, second = run_ranks(2, rank)
    assert first == second
    assert "b: it differs from a in the checkpoint, and is one with it in the target (rank 1)" in first


def test_tensors_that_rules_make_are_one_here_when_they_are_made_of_one(tmp_path: Path) -> None:
    tied = torch.zeros(2)
    saved = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.full((2,), 2.0), "d": torch.ones(2)}
    reknit.save(tmp_path / "x", {"m": saved})
    for rule, second, why in (
        (transforms.copy("a", "e"), "e", None),
        (transforms.rename("b", "e"), "e", None),
        (transforms.rename("c", "e"), "e", "it differs from m/a in the checkpoint"),
        (transforms.rename("b", "e"), "c", "it differs from m/a in the checkpoint"),
        (transforms.rename("b", "e"), "d", None),
    ):
        target = {"m": {"a": tied, second: tied}}
        options = reknit.LoadOptions(transforms=[rule])
        report = reknit.load(tmp_path / "x", target, strict=["!m/[bcde]"], options=options)
        reasons = list(report.mismatched.values())
        assert [reason.startswith(why or "?") for reason in reasons] == ([True] if why else [])
        assert tied.tolist() == [1, 1]
    rules = [transforms.rename("c", "e"), transforms.drop("b"), transforms.drop("d")]
    options = reknit.LoadOptions(transforms=rules)
    with pytest.raises(MismatchError, match="it differs from m/a in the checkpoint"):
        reknit.load(tmp_path / "x", {"m": {"a": tied, "e": tied}}, options=options)


def _tied_dtensor(folder: str) -> str:
    rank = dist.get_rank()
    other = torch.arange(8.0).reshape(4, 2)
    other[0, 0] += 1
    reknit.save(folder, {"a": torch.arange(8.0).reshape(4, 2), "b": other})
    target = distribute_tensor(torch.full((4, 2), 7.0), init_device_mesh("cpu", (2,)), [Cut(0)])
    with pytest.raises(MismatchError) as caught:
        reknit.load(folder, {"a": target, "b": target})
    assert target.to_local().tolist() == [[7, 7], [7, 7]], rank
    return str(caught.value)


def test_each_rank_compares_what_it_holds_of_tied_tensors(tmp_path: Path) -> None:
    first, second = run(2, _tied_dtensor, str(tmp_path / "x"))
    assert first == second
    assert "b: it differs from a in the checkpoint, and is one with it in the target (rank 0)" in first
