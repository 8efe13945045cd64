"""Targets over memory that the process may not write."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.errors import StateError
from reknit.frameworks.walk import overlap
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.filterwarnings("ignore:.*not writable")


def _over_memmap(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))


def _array_over_memmap(path: Path) -> NDArray[Any]:
    array: NDArray[Any] = _over_memmap(path).numpy()
    assert array.flags.writeable  # by the word of torch
    return array


def _over_mapping(path: Path) -> torch.Tensor:
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.float32)


@table("over", [_over_memmap, _over_mapping])
@table("form", ["whole", "part", "negative", "parameter", "buffer"])
def test_a_tensor_over_a_read_only_mapping_is_refused_before_anything_changes(
    over: Any, form: str, tmp_path: Path
) -> None:
    (tmp_path / "values").write_bytes(bytes(4 * 5000))
    tensor = over(tmp_path / "values")
    made: dict[str, Any] = {
        "whole": tensor,
        "part": tensor[4000:].view(10, 100).t(),
        "negative": tensor[::3],
        "parameter": torch.nn.ParameterDict({"x": torch.nn.Parameter(tensor)}),
        "buffer": torch.nn.Module(),
    }
    made["buffer"].register_buffer("x", tensor)
    other = torch.zeros(3)
    reknit.save(tmp_path / "saved", {"m": made[form], "other": torch.ones(3)})
    with pytest.raises(StateError, match=r"m(/x)? is a tensor over a read-only mapping"):
        reknit.load(tmp_path / "saved", {"other": other, "m": made[form]})
    assert other.tolist() == [0, 0, 0]


def test_a_value_of_a_rank_is_replaced_where_it_cannot_be_filled(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes(4 * 8))
    presents: list[Any] = [
        _over_memmap(tmp_path / "values").reshape(2, 4),
        _array_over_memmap(tmp_path / "values").reshape(2, 4),
        np.broadcast_to(np.zeros(4, np.float32), (2, 4)),
        np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (2, 4), (0, 4)),
        torch.zeros(4).expand(2, 4),
    ]
    for number, present in enumerate(presents):
        saved = np.arange(8, dtype=np.float32).reshape(2, 4)
        given = saved if isinstance(present, np.ndarray) else torch.from_numpy(saved)
        reknit.save(tmp_path / str(number), {"m": reknit.PerRank(given)})
        target = reknit.PerRank(present)
        reknit.load(tmp_path / str(number), {"m": target})
        assert type(target.value) is type(present)
        assert target.value.tolist() == saved.tolist()
        assert not np.asarray(present).any()


def test_a_tensor_over_a_mapping_that_may_be_written_is_filled(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes(4 * 5000))
    target = torch.from_numpy(np.memmap(tmp_path / "values", dtype=np.float32, mode="r+"))
    reknit.save(tmp_path / "saved", {"m": torch.ones(5000)})
    reknit.load(tmp_path / "saved", {"m": target})
    assert target.eq(1).all()


@table("form", ["whole", "part", "listed", "reversed bytes", "number"])
def test_an_array_of_a_tensor_over_a_read_only_mapping_is_refused(form: str, tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes(4 * 5000))
    array = _array_over_memmap(tmp_path / "values")
    made: dict[str, Any] = {
        "whole": array,
        "part": array[4000:].reshape(10, 100).T,
        "listed": [array],
        "reversed bytes": array.view(">f4"),
        "number": array[:1].reshape(()),
    }
    saved = 1.0 if form == "number" else made[form]
    reknit.save(tmp_path / "saved", {"m": saved})
    with pytest.raises(StateError, match=r"m(/0)? is an array over a read-only mapping"):
        reknit.load(tmp_path / "saved", {"m": made[form]})


@table("form", ["missing", "shape", "dtype"])
@table("over", [_over_memmap, _array_over_memmap])
def test_a_lenient_load_takes_memory_that_it_leaves_as_it_is(over: Any, form: str, tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes(4 * 8))
    state: dict[str, Any] = {"other": torch.ones(3)}
    if form != "missing":
        state["m"] = torch.ones(3) if form == "shape" else torch.ones(8, dtype=torch.int32)
    reknit.save(tmp_path / "saved", state)
    target = {"other": torch.zeros(3), "m": over(tmp_path / "values")}
    reknit.load(tmp_path / "saved", target, strict=False)
    assert target["other"].tolist() == [1, 1, 1]
    assert not target["m"].any()


def test_the_kernel_is_asked_about_foreign_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def ask() -> tuple[list[int], list[int]]:
        asked.append(([], []))
        return asked[-1]

    monkeypatch.setattr(overlap, "_read_only", ask)
    own = (torch.zeros(3), np.zeros(3), np.zeros((3, 4))[1:].T, torch.zeros(2, device="meta"))
    overlap.require_writable([("a", memory) for memory in own])
    assert not asked
    overlap.require_writable([("a", torch.from_numpy(np.zeros(3)))])
    assert asked


def test_memory_is_filled_where_the_kernel_lists_no_mappings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(overlap, "_MAPS", tmp_path / "none")
    target = torch.from_numpy(np.zeros(3, np.float32))
    reknit.save(tmp_path / "saved", {"m": torch.ones(3)})
    reknit.load(tmp_path / "saved", {"m": target})
    assert target.eq(1).all()
