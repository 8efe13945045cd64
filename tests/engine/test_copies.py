"""The comparison of copies, the choice of the copy to keep, and the reaction to copies that differ."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from reknit.engine.memory.devices import gathered
from reknit.engine.memory.elements import bits
from reknit.engine.memory.images import Sources
from reknit.engine.saving import part as module
from reknit.engine.saving.part import EQUAL, KEPT_NBYTES, SAMPLE_NBYTES, choose, encode_holdings, split
from reknit.errors import ReknitError, ShortageError, StateError
from reknit.format.blob_codec import decode_blobs
from reknit.options import SaveOptions
from reknit.planner.columns import unpacked
from reknit.types.box import Box
from reknit.types.shard import Alias, Holdings, Shard, TensorSpec
from tests.devices import every_simulated_device
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from reknit.engine.messages import Copies
    from tests.accelerator import Accelerator


def shard(fqn: str, replicas: tuple[int, ...] | None, data: Any, box: Box | None = None) -> Shard:
    shape = tuple(data.shape) if box is None else (1000,)
    return Shard("m", fqn, TensorSpec(shape, "uint8"), box or Box.whole(shape), replicas, data)


def compared(shards: list[Shard], check: str = "sample", size: int = 2, *aliases: Alias) -> Copies:
    encoded = encode_holdings(Holdings(("m",), tuple(shards), (), aliases), SaveOptions())
    return choose(encoded, check, 0, size).copies(Sources(shard.memory for shard in shards))


def names(copies: Copies) -> list[str]:
    return [fqn for _, fqn, _, _ in msgspec.msgpack.decode(copies.names)]


def by_name(copies: Copies) -> dict[str, int]:
    return dict(zip(names(copies), unpacked(copies.digests, "u8").tolist(), strict=True))


def held(last: int, nbytes: int) -> list[Shard]:
    data = np.zeros(nbytes, np.uint8)
    data[-1] = last
    return [
        shard(fqn, replicas, data)
        for fqn, replicas in [("guessed", None), ("vouched", (0, 1)), ("alone", (0,)), ("others", (1, 2))]
    ]


def test_copies_are_compared_by_their_bytes() -> None:
    for check, nbytes, size in one_by_one(
        product(["off", "sample", "warn", "all"], [4, SAMPLE_NBYTES, SAMPLE_NBYTES + 1], [1, 2])
    ):
        one, same, other = (by_name(compared(held(last, nbytes), check, size)) for last in (4, 4, 5))
        assert one == same
        assert (
            one.keys() == other.keys() == (set() if check == "off" or size == 1 else {"guessed", "vouched"})
        )
        if one:
            assert one["guessed"] != other["guessed"], "without a given replica set, all bytes are compared"
            assert (one["vouched"] == other["vouched"]) == (nbytes > SAMPLE_NBYTES and check != "all")


def test_memory_of_any_order_is_compared_in_that_of_its_elements() -> None:
    cases: list[Any] = [lambda n: np.arange(n, dtype=np.uint8), lambda n: torch.arange(n, dtype=torch.uint8)]
    for make in one_by_one(cases):
        plain = make(200).reshape(10, 20)
        turned = make(200).reshape(10, 20).T
        turned = turned.copy().T if isinstance(turned, np.ndarray) else turned.contiguous().T
        assert compared([shard("a", None, plain)]) == compared([shard("a", None, turned)])


def test_what_lies_on_a_device_is_gathered_there_lot_by_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_NBYTES", 64 << 10)
    monkeypatch.setattr(module, "GATHER_NBYTES", 150)
    flat = torch.arange(1 << 17).to(torch.int16)
    sources = [flat[k : k + 7 * k] for k in range(1, 9)] + [
        flat.view(512, 256).T,
        flat,
        flat[3],
        flat[:6].view(2, 3).T,
    ]
    sources.append(torch.arange(4).to(torch.complex128))
    nbytes = [min(s.numel() * s.element_size(), 40 + 2 * k) for k, s in enumerate(sources)]
    nbytes[-1] = 32
    nbytes[9] = 2 << 16
    got = dict(module.first_bytes(sources, nbytes))
    for place, source in enumerate(sources):
        expected = source.contiguous().reshape(-1).view(torch.uint8)[: nbytes[place]]
        assert got[place].tolist() == expected.tolist()


@every_simulated_device
def test_tensors_of_any_usual_size_leave_a_device_together(
    accelerator: Accelerator, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHER_NBYTES", 2 << 20)
    lots: list[list[int]] = []

    def counted(lot: Any, nbytes: Any) -> Any:
        lots.append([place for place, _ in lot])
        return gathered(lot, nbytes)

    monkeypatch.setattr(module, "gathered", counted)
    sources = [torch.full((300_000,), number, dtype=torch.int32) for number in range(5)]
    there = [bits(s.to(f"{device_type}:{n % 2}")) for n, s in enumerate(sources)]
    sizes = [source.nbytes for source in sources]
    accelerator.reset_peak()
    before = accelerator.in_use()
    got = dict(module.first_bytes(there, sizes))
    assert accelerator.peak() - before <= 2 << 20
    assert all(np.array_equal(got[n].view(np.int32), s.numpy()) for n, s in enumerate(sources))
    assert lots == [[0], [1], [2], [3], [4]]
    monkeypatch.setattr(module, "GATHER_NBYTES", 64 << 20)
    lots.clear()
    dict(module.first_bytes(there, sizes))
    assert lots == [[0, 2, 4], [1, 3]]


@every_simulated_device
@pytest.mark.parametrize("numel", [10, 2 << 20])
def test_a_device_that_cannot_copy_is_named(accelerator: Accelerator, device_type: str, numel: int) -> None:
    there = bits(torch.ones(numel, device=f"{device_type}:1").view(-1, 2).t())
    accelerator.refuse_memory()
    with pytest.raises(ShortageError, match=f"were to be compared, from {device_type}:1"):
        list(module.first_bytes([there], [4 * numel]))
    accelerator.reset()
    accelerator.fail_copy()
    with pytest.raises(ReknitError, match=f"a copy from or to {device_type}:1 failed"):
        list(module.first_bytes([there], [4 * numel]))


def differing(copies: Copies, fqn: str) -> list[tuple[int, list[int]]]:
    return [(int(unpacked(copies.keys, "i8")[names(copies).index(fqn)]), [0, 1])]


def test_a_rank_keeps_its_own_of_a_small_tensor_that_differs() -> None:
    copies = compared(
        [
            shard("b", (0, 1), np.arange(3, dtype=np.uint8)),
            shard("a", None, np.arange(6, dtype=np.uint8).reshape(2, 3)),
        ]
    )
    assert split(copies, [], 1, "sample") is EQUAL
    assert split(copies, [(7, [0, 1])], 1, "sample") == EQUAL, "what others hold"
    for fqn, shape in (("a", (2, 3)), ("b", (3,))):
        done = split(copies, differing(copies, fqn), 1, "sample")
        (blob,) = done.blobs
        assert (blob.item, blob.coordinate) == ("m", {"rank": 1})
        value = decode_blobs(blob.data)[fqn]
        assert value.shape == shape
        assert value.ravel().tolist() == list(range(value.size))
        assert (done.kept, done.unequal) == ([("m", fqn, "0, 1")], [])


def test_what_no_rank_can_keep_fails_the_save_with_its_name() -> None:
    for kind in one_by_one(["large", "part", "tied", "nameless"]):
        data = np.zeros(SAMPLE_NBYTES + 1 if kind == "large" else 4, np.uint8)
        one = shard("w", (0, 1), data)
        if kind == "part":
            one = shard("w", None, data, Box((8,), (4,)))
        if kind == "nameless":
            one = Shard("m", "w", TensorSpec((4,), "float4_e2m1fn_x2"), Box.whole((4,)), None, data)
        copies = compared(
            [one, shard("z", None, np.zeros(2000, np.uint8))],
            "sample",
            2,
            *([Alias("m", "v", "w")] if kind == "tied" else []),
        )
        with pytest.raises(
            StateError, match=r"(?s)different values of m/w \(ranks 0, 1\).*PerRank.*check_replicas='warn'"
        ):
            split(copies, differing(copies, "w"), 0, "sample")
        done = split(copies, differing(copies, "w"), 0, "warn")
        assert (done.blobs, done.kept, done.unequal) == ([], [], [("m", "w", "0, 1")])


def test_what_is_kept_is_bounded_and_what_nobody_vouches_for_goes_first() -> None:
    half = KEPT_NBYTES // 2
    shards = [shard(f"v{k}", (0, 1), np.zeros(SAMPLE_NBYTES, np.uint8)) for k in range(600)]
    shards += [shard("large", None, np.zeros(half, np.uint8)), shard("small", None, np.zeros(10, np.uint8))]
    shards += [shard("too large", None, np.zeros(half, np.uint8))]
    copies = compared(shards)
    assert len(copies.data) <= KEPT_NBYTES
    assert names(copies)[0] == "small"
    kept = split(copies, [(int(key), [0, 1]) for key in unpacked(copies.keys, "i8")], 0, "warn").kept
    assert {fqn for _, fqn, _ in kept} >= {"small"}
    assert len(kept) == 2
    many = compared(shards[:600])
    assert len(many.data) == KEPT_NBYTES
    assert len(names(many)) == 600
