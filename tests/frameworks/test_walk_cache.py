"""A walk over an unchanged state reuses the results of the last one, and nothing that has changed."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from contextlib import nullcontext, suppress
from ctypes import string_at
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from reknit.engine.saving.layout import FileCut, layout_digest
from reknit.engine.saving.part import encode_holdings
from reknit.errors import ReknitError
from reknit.frameworks import registry
from reknit.frameworks.walk.save_walk import Saving
from reknit.frameworks.walk.walk_cache import WalkCache
from reknit.options import SaveOptions
from tests.frameworks import changes
from tests.ranks import run
from tests.running.examples import examples
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.types.shard import Holdings

    State = dict[str, Any]


def described(held: Holdings) -> Any:
    """Return all that is stored of holdings."""
    encoded = encode_holdings(held, SaveOptions())
    return (
        held.items,
        [(shard, shard.frozen, *_read(shard.data)) for shard in held.shards],
        _read_at(held) if held.runs else [_read(shard.data)[0] for shard in held.shards],
        [(one.item, one.key, one.coordinate, one.data) for one in encoded.blobs],
        [(blob.item, blob.fqn) for blob in held.blobs],
        held.aliases,
        held.witnesses,
        held.barriers,
        dict(held.coordinate),
        encoded.guessed,
        encoded.keys,
        layout_digest(held, FileCut(1 << 30)),
    )


def _read(memory: Any) -> tuple[Any, ...]:
    """Return the values in a memory, and how they lie in it."""
    if not isinstance(memory, torch.Tensor):
        return memory.tobytes(), memory.shape, memory.strides, memory.dtype
    own = memory.detach().resolve_neg().resolve_conj()
    return own.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), own.shape, own.stride(), own.dtype


def _read_at(held: Holdings) -> list[bytes]:
    """Return the bytes at the addresses of the shards."""
    assert held.runs is not None
    sizes = [shard.nbytes for shard in held.shards]
    return [string_at(at, size) for at, size in zip(held.runs.addresses, sizes, strict=True)]


def outcome(state: State, rank: int, size: int, *, anew: bool) -> Any:
    """Return the holdings of a state, or the error that refuses it."""
    other = patch("reknit.frameworks.walk.walk_cache.walk_cache", WalkCache()) if anew else nullcontext()
    try:
        with other:
            return described(registry.collect(state, rank, size))
    except ReknitError as error:
        return type(error), str(error)


def num_visited(state: State, rank: int = 0, size: int = 1) -> int:
    """Return the number of tensors that a collection inspects one by one."""
    with patch.object(Saving, "view", autospec=True, side_effect=Saving.view) as view:
        registry.collect(state, rank, size)
    return view.call_count


def _compare(mesh: Any, rank: int, size: int, seed: int, order: list[int]) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    state = changes.make(mesh)
    for number in [None, *order]:
        if number is not None:
            with suppress(*changes.REFUSED):
                changes.ALL[number](state, chosen)
        expected = outcome(state, rank, size, anew=True)
        for _ in range(2):
            assert outcome(state, rank, size, anew=False) == expected


@table("number", range(len(changes.ALL)))
def test_what_one_change_changes_is_found_as_by_a_new_walk(number: int) -> None:
    for seed in range(examples(8)):  # some changes have as many forms
        _compare(None, 0, 1, seed, [number])


orders = st.lists(st.integers(0, len(changes.ALL) - 1), min_size=1, max_size=8)


@settings(max_examples=examples(24), suppress_health_check=[HealthCheck.too_slow])
@example(seed=202, order=[0, 0, 0, 1, 2])  # a slice of a parameter that has no dimension by then
@given(seed=st.integers(0, 1 << 30), order=orders)
def test_whatever_changes_between_saves_is_found_as_by_a_new_walk(seed: int, order: list[int]) -> None:
    _compare(None, 0, 1, seed, order)


class Switched(nn.Linear):
    """A module whose state dict has its bias or not."""

    shows = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.shows:
            destination[prefix + "bias"] = self.bias


def _share_memory(state: State) -> None:
    state["inside"]["b"] = state["inside"]["a"].detach()


def _share_another(state: State) -> None:
    state["inside"]["b"] = state["inside"]["c"]


def _hold_twice(state: State) -> None:
    state["inside"]["list"][0] = state["inside"]["a"]


def _show_buffer(state: State) -> None:
    state["model"].register_buffer("hidden", torch.zeros(3), persistent=True)


def _show_less(state: State) -> None:
    state["switched"].shows = False


@table("change", [_share_memory, _share_another, _hold_twice, _show_buffer, _show_less])
def test_tensors_that_look_as_before_are_stored_as_they_are_now(change: Callable[[State], None]) -> None:
    state = changes.make(None)
    a, c = torch.rand(2), torch.rand(2)
    state["inside"] = {"a": a, "b": a if change is _share_another else torch.rand(2), "c": c, "list": [1, 2]}
    if change is _show_less:
        state["switched"] = Switched(2, 2)
    for _ in range(2):
        registry.collect(state, 0, 1)
    before = outcome(state, 0, 1, anew=False)
    change(state)
    assert before != outcome(state, 0, 1, anew=True)
    assert outcome(state, 0, 1, anew=False) == outcome(state, 0, 1, anew=True)


def _with_dtensors(num: int) -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = torch.distributed.get_rank()
    chosen = random.Random(5)
    for _ in range(num):
        order = [chosen.randrange(len(changes.ALL)) for _ in range(chosen.randrange(1, 10))]
        _compare(mesh, rank, 2, chosen.randrange(1 << 30), order)
    state = {"model": changes.make(mesh)["model"]}
    registry.collect(state, rank, 2)
    return num_visited(state, rank, 2)


def test_whatever_changes_between_saves_of_dtensors_is_found_as_by_a_new_walk() -> None:
    assert run(2, _with_dtensors, examples(24)) == [0, 0]


def _as_it_was() -> None:
    state = changes.make(None)
    registry.collect(state, 0, 1)
    for number in range(3):
        changes.train(state, random.Random(number))
        assert num_visited(state) == 0
        assert outcome(state, 0, 1, anew=False) == outcome(state, 0, 1, anew=True)


def test_a_state_that_is_as_it_was_is_not_walked_through() -> None:
    assert run(1, _as_it_was) == [None]  # in this process, other tests may have changed torch's modules


def _moved_in_memory() -> None:
    state = changes.make(None)
    registry.collect(state, 0, 1)
    layer, buffers = state["model"][0], state["model"][1]._buffers
    layer.weight = nn.Parameter(torch.rand(4, 4))
    layer.bias.data = torch.rand(4)
    buffers["running_mean"] = torch.rand(4)
    state["ema"]["shadow"] = torch.rand(4)
    del state["optimizer"], state["schedule"]  # which have the weight that was there before
    registry.collect(state, 0, 1)
    layer.weight = nn.Parameter(torch.rand(4, 4))
    assert num_visited(state) == 0
    assert outcome(state, 0, 1, anew=False) == outcome(state, 0, 1, anew=True)


def test_tensors_that_moved_in_memory_are_read_where_they_are_now() -> None:
    assert run(1, _moved_in_memory) == [None]


def _calls(state: State) -> int:
    """Return the number of Python calls in a walk through a state that is as it was."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(2):
        registry.collect(state, 0, 1)
    sys.setprofile(count)
    try:
        registry.collect(state, 0, 1)
    finally:
        sys.setprofile(None)
    return calls


def _calls_of_many() -> int:
    mesh = init_device_mesh("cpu", (1,))
    local = [torch.ones(1, 2) for _ in range(400)]
    tensors = [DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for one in local]
    few, many = ({"m": {str(n): tensors[n] for n in range(number)}} for number in (200, 400))
    return _calls(many) - _calls(few)


def test_more_tensors_that_are_as_they_were_take_no_more_python_calls() -> None:
    assert run(1, _calls_of_many) == [0]


def _given_other_memory() -> list[bytes]:
    weight = torch.arange(1024.0)
    for _ in range(2):
        held = registry.collect({"model": {"weight": weight}}, 0, 1)
    weight.data = torch.zeros(1024)
    assert held.runs is not None
    assert [one.data_ptr() for one in held.runs.kept] == list(held.runs.addresses)
    return _read_at(held)


def test_memory_is_kept_at_its_address_even_if_its_tensor_gets_other_memory() -> None:
    assert run(1, _given_other_memory) == [[torch.arange(1024.0).numpy().tobytes()]]


def _declare(tensor: Any) -> None:
    tensor.global_shape, tensor.global_offsets = (4,), ((2,),)
    tensor.local_offsets, tensor.local_sizes = ((0,),), ((2,),)


CHANGES: dict[str, Callable[[Any], object]] = {
    "sparse": lambda state: state.update(a=torch.ones(2).to_sparse()),
    "a view": lambda state: state.update(a=torch.arange(4.0)[::2]),
    "of another length": lambda state: state["a"].resize_(3),
    "of another dtype": lambda state: setattr(state["a"], "data", torch.ones(2, dtype=torch.int32)),
    "negative": lambda state: state.update(a=torch._neg_view(torch.ones(2))),
    "declared": lambda state: _declare(state["a"]),
    "a parameter": lambda state: state.update(a=nn.Parameter(torch.ones(2))),
    "twice": lambda state: state.update(b=state["a"]),
    "of one memory": lambda state: state.update(b=state["a"].view(2)),
    "of other memory": lambda state: setattr(state["a"], "data", torch.rand(2)),
}


@table("name", CHANGES)
def test_a_tensor_that_is_now_otherwise_is_stored_as_it_is_now(name: str) -> None:
    tensors: State = {"a": torch.rand(2), "b": torch.rand(2)}
    state = {"tensors": tensors}
    for _ in range(2):
        registry.collect(state, 0, 1)
    CHANGES[name](tensors)
    for _ in range(2):
        assert outcome(state, 0, 1, anew=False) == outcome(state, 0, 1, anew=True)


def _changed_inside() -> None:
    mesh = init_device_mesh("cpu", (1,))

    def made(local: Any, **options: Any) -> Any:
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **options)

    larger = made(torch.ones(2, 2), shape=torch.Size((3, 2)), stride=(2, 1))
    others: list[Any] = [torch.ones(2, 2, dtype=torch.float64), torch.arange(8.0).view(2, 4)[:, ::2], larger]
    for other in others:
        tensor: Any = made(torch.ones(2, 2))
        state: State = {"model": {"a": tensor, "b": torch.ones(2)}}
        for _ in range(2):
            registry.collect(state, 0, 1)
        if isinstance(other, DTensor):  # of the same placements
            other._spec.placements = tensor._spec.placements
            state["model"]["a"] = other
        else:
            tensor._local_tensor = other
        expected = outcome(state, 0, 1, anew=True)
        assert outcome(state, 0, 1, anew=False) == expected


def test_a_dtensor_with_another_form_below_the_same_layout_is_looked_at() -> None:
    assert run(1, _changed_inside) == [None]


def _beside_another_mesh() -> list[str]:
    rank = torch.distributed.get_rank()
    elsewhere = DeviceMesh("cpu", [0])
    state: State = {"m": {"a": distribute_tensor(torch.ones(4), elsewhere, [Shard(0)]), "b": torch.rand(2)}}
    for _ in range(3):
        assert outcome(state, rank, 2, anew=False) == outcome(state, rank, 2, anew=True)
    return [shard.fqn for shard in registry.collect(state, rank, 2).shards]


def test_a_tensor_after_one_of_other_ranks_is_read_at_its_own_address() -> None:
    assert run(2, _beside_another_mesh) == [["a", "b"], ["b"]]


def test_what_was_found_keeps_nothing_alive() -> None:
    state: State = changes.make(None)
    registry.collect(state, 0, 1)
    registry.collect(state, 0, 1)
    model, optimizer = state["model"], state["optimizer"]
    alive = [weakref.ref(one) for one in (model, optimizer, *model.parameters(), state["ema"]["shadow"])]
    alive += [weakref.ref(one) for each in optimizer.state.values() for one in each.values()]
    del state, model, optimizer
    gc.collect()
    assert [one() for one in alive if one() is not None] == []


def test_states_of_other_items_and_other_ranks_are_kept_apart() -> None:
    whole = changes.make(None)
    states = [whole, {"model": whole["model"]}, {"model": nn.Linear(2, 2), "step": 3}]
    for _ in range(2):
        for state in states:
            for rank, size in ((0, 1), (1, 2)):
                expected = outcome(state, rank, size, anew=True)
                assert outcome(state, rank, size, anew=False) == expected


def test_a_value_that_cannot_be_saved_any_more_is_refused() -> None:
    state = changes.make(None)
    registry.collect(state, 0, 1)
    state["optimizer"].param_groups[0]["own"] = torch.rand(2).to_sparse()
    with pytest.raises(ReknitError, match="own"):
        registry.collect(state, 0, 1)


def test_a_class_that_is_patched_between_saves_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = changes.make(None)
    registry.collect(state, 0, 1)
    own = changes.Adapted.state_dict
    monkeypatch.setattr(
        changes.Adapted,
        "state_dict",
        lambda self, *args, **kwargs: {
            key: value for key, value in own(self, *args, **kwargs).items() if not key.endswith("scale")
        },
    )
    assert outcome(state, 0, 1, anew=False) == outcome(state, 0, 1, anew=True)


def _gathered() -> tuple[int, bool]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = torch.distributed.get_rank()
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    registry.collect(state, rank, 2)
    model(torch.ones(1, 4))  # the gathered parameters stay there
    visited = num_visited(state, rank, 2)
    model(torch.ones(1, 4))
    found = outcome(state, rank, 2, anew=False)
    model(torch.ones(1, 4))
    return visited, found == outcome(state, rank, 2, anew=True)


def test_parameters_that_fsdp2_has_gathered_are_read_from_their_shards() -> None:
    assert run(2, _gathered) == [(0, True)] * 2


def _tied_to_a_mesh() -> list[int]:
    rank = torch.distributed.get_rank()
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "tp")]
    found = []
    for mesh in (*meshes, *meshes):
        layer = nn.Linear(4, 4, bias=False)
        whole = torch.ones(4, 4)
        layer.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        state = {"model": layer}
        for _ in range(2):
            held = registry.collect(state, rank, 2)
            assert described(held) == outcome(state, rank, 2, anew=True)
            found.append(dict(held.coordinate))
    return [list(each) == ["dp"] for each in found]


def _placed_otherwise() -> list[list[tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2,))
    rank = torch.distributed.get_rank()
    state: State = {"weights": {"a": torch.rand(3), "b": torch.rand(3)}}
    found = []
    for placement in (Shard(0), _StridedShard(0, split_factor=2), Shard(0)):
        local = torch.rand(2, 4)
        state["weights"]["a"] = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
        )
        for _ in range(2):
            held = registry.collect(state, rank, 2)
            assert described(held) == outcome(state, rank, 2, anew=True)
            found.append([shard.box.offsets for shard in held.shards if shard.fqn == "a"])
    # as Megatron-FSDP does
    chunks = [SimpleNamespace(offsets=(1, 0), sizes=(2, 4))]
    inside = state["weights"]["a"]._local_tensor
    setattr(inside, "__create_chunk_list__", lambda: chunks)  # noqa: B010 - a name that Python would mangle
    held = registry.collect(state, rank, 2)
    return [*found, [shard.box.offsets for shard in held.shards if shard.fqn == "a"]]


def test_a_tensor_that_is_cut_otherwise_into_as_much_is_found_elsewhere() -> None:
    first, second = run(2, _placed_otherwise)
    plain, strided = [(0, 0)], [(0, 0), (2, 0)]
    assert first == [plain, plain, strided, strided, plain, plain, [(1, 0)]]
    plain, strided = [(2, 0)], [(1, 0), (3, 0)]
    assert second == [plain, plain, strided, strided, plain, plain, [(1, 0)]]


def test_the_coordinate_is_that_of_the_mesh_that_tensors_have_now() -> None:
    assert run(2, _tied_to_a_mesh) == [[True, True, False, False] * 2] * 2


def test_a_dict_with_integer_keys_is_noted_in_every_walk() -> None:
    state: State = {"m": {0: torch.ones(2), 1: {5: 1}}, "n": {"list": [torch.ones(2)]}}
    for _ in range(2):
        assert outcome(state, 0, 1, anew=False) == outcome(state, 0, 1, anew=True)
    held = registry.collect(state, 0, 1)
    assert [(one.item, one.fqn) for one in held.blobs] == [("m", "~dict"), ("m", "1/~dict"), ("m", "1/5")]
