"""Ranks that hold different values of one tensor: each gets its own back, or the save fails on all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

import reknit
from reknit.cli.main import main
from reknit.engine.saving.part import KEPT_NBYTES
from reknit.storage.registry import open_storage
from reknit.testing.world import run_ranks
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group

    State = dict[str, Any]

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn)


def drawn(rank: int) -> State:
    """Return a state with values common to all ranks, and values of one rank, without a mark on either."""
    random = torch.Generator().manual_seed(rank)
    tensors = {str(kind): torch.rand(2, 3, generator=random).to(kind) for kind in DTYPES}
    return {
        "rng": torch.Generator().manual_seed(rank).get_state(),
        "own": {**tensors, "turned": torch.rand(4, 5, generator=random).T, "list": [torch.tensor(rank), 7]},
        "array": {"a": np.arange(rank, rank + 4.0), "scalar": np.array(rank, np.int16)},
        "equal": {"w": torch.arange(6.0)},
    }


def empty(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: empty(value) for key, value in state.items()}
    if isinstance(state, list):
        return [empty(value) for value in state]
    return (
        state
        if isinstance(state, int)
        else state * 0
        if isinstance(state, np.ndarray)
        else torch.zeros_like(state)
    )


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict | list):
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    else:
        np.testing.assert_array_equal(one, other)


def each(size: int, call: Callable[[Group], Any]) -> list[Any]:
    """Return the result or the error of a call on every rank."""

    def rank(group: Group) -> Any:
        try:
            return call(group)
        except reknit.ReknitError as error:
            return error

    return run_ranks(size, rank)


@pytest.mark.parametrize("wait", [True, False])
def test_a_tensor_that_differs_between_ranks_is_given_back_to_each(wait: bool) -> None:
    ProcessMemory.clear("differs")

    def rank(group: Group) -> None:
        for step in range(2):  # the second save finds the plan of the first
            state = drawn(group.rank + 10 * step)
            path = f"process://differs/{step}"
            report = reknit.save(path, state, wait=wait, group=group).result()
            (warning,) = report.warnings
            assert "different values of" in warning
            assert "own/turned (ranks 0, 1, 2)" in warning
            assert "equal/w" not in warning
            target = empty(state)
            reported = reknit.load(path, target, group=group)
            assert_same(target, state)
            assert {"rng", "own/turned", "array/a", "equal/w"} <= set(reported.restored)

    run_ranks(3, rank)


def test_copies_that_begin_to_differ_or_cease_to_are_seen_at_the_next_background_save() -> None:
    ProcessMemory.clear("turns")

    def rank(group: Group) -> None:
        for step, value in enumerate((0, group.rank, 0)):
            path, state = f"process://turns/{step}", {"t": torch.full((5,), float(value))}
            report = reknit.save(path, state, wait=False, group=group).result()
            assert len(report.warnings) == (step == 1)
            target = empty(state)
            reknit.load(path, target, group=group)
            assert_same(target, state)
            with reknit.open(path) as checkpoint:
                assert list(checkpoint.tensors["t"]) == ([] if step == 1 else [""])

    run_ranks(2, rank)


def test_what_each_rank_has_for_itself_and_what_all_share_are_not_one_tensor() -> None:
    ProcessMemory.clear("tied")

    def rank(group: Group) -> None:
        one, own = torch.ones(5), torch.full((5,), float(group.rank))
        reknit.save("process://tied/x", {"a": own, "b": one, "c": own + 1}, group=group)
        for names in ("ab", "ba", "ac"):
            tied = torch.zeros(5)
            with pytest.raises(reknit.MismatchError, match="each rank has its own in the checkpoint"):
                reknit.load("process://tied/x", dict.fromkeys(names, tied), group=group)
            assert not tied.any()

    run_ranks(2, rank)


def test_no_other_job_is_given_what_differed() -> None:
    ProcessMemory.clear("elsewhere")
    run_ranks(2, lambda group: reknit.save("process://elsewhere/x", drawn(group.rank), group=group))

    def rank(group: Group) -> None:
        target = empty(drawn(0))
        why = r"missing: .*\brng\b.*: it differed between the 2 ranks"
        with pytest.raises(reknit.MismatchError, match=why):
            reknit.load("process://elsewhere/x", target, group=group)
        assert_same(target, empty(drawn(0)))
        report = reknit.load("process://elsewhere/x", target, group=group, strict=False)
        assert "rng" in report.missing
        assert not target["rng"].any()
        assert_same(target["equal"], drawn(0)["equal"])

    for size in (1, 3):
        run_ranks(size, rank)


def test_a_rank_that_held_nothing_of_it_is_given_nothing_of_it() -> None:
    ProcessMemory.clear("some")

    def rank(group: Group) -> None:
        state: State = {"m": {"all": torch.ones(1)}}
        if group.rank:
            state["m"]["some"] = torch.full((3,), float(group.rank))
        reknit.save("process://some/x", state, group=group)
        target = {"m": {"all": torch.zeros(1), "some": torch.zeros(3)}}
        with pytest.raises(reknit.MismatchError, match=r"m/some.*\(rank 0\)"):
            reknit.load("process://some/x", target, group=group)

    run_ranks(3, rank)


def test_a_target_of_another_kind_is_refused() -> None:
    ProcessMemory.clear("kind")

    def rank(group: Group) -> None:
        reknit.save("process://kind/x", {"t": torch.full((3,), float(group.rank))}, group=group)
        for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
            with pytest.raises(reknit.MismatchError, match=r"mismatched: t: "):
                reknit.load("process://kind/x", {"t": other}, group=group)
            assert not other.any()

    run_ranks(2, rank)


def test_what_was_kept_undeclared_can_be_declared_later() -> None:
    ProcessMemory.clear("later")

    def rank(group: Group) -> None:
        reknit.save("process://later/x", {"t": torch.full((3,), float(group.rank))}, group=group)
        tensor = torch.zeros(3)
        reknit.load("process://later/x", {"t": reknit.PerRank(tensor)}, group=group)
        assert tensor.tolist() == [group.rank] * 3

    run_ranks(2, rank)


@pytest.mark.parametrize("wait", [True, False])
def test_a_large_tensor_that_differs_fails_the_save_on_all_ranks_by_name(wait: bool) -> None:
    ProcessMemory.clear("large")

    def save(group: Group, check: Literal["sample", "warn", "off"]) -> Any:
        large = np.zeros(KEPT_NBYTES + 1, np.uint8)
        large[-1] = group.rank == 2
        options = reknit.SaveOptions(check_replicas=check)
        return reknit.save(
            "process://large/x", {"m": {"w": large}}, wait=wait, group=group, options=options
        ).result()

    for error in each(3, lambda group: save(group, "sample")):
        assert isinstance(error, reknit.errors.StateError), error
        assert "different values of m/w (ranks 0, 1, 2)" in str(error)
        assert "PerRank" in str(error)
    assert not list(open_storage("process://large/x").list())
    for report in each(3, lambda group: save(group, "warn")):
        assert "m/w (ranks 0, 1, 2); one rank's copy was stored" in report.warnings[0]
    ProcessMemory.clear("large")
    for report in each(3, lambda group: save(group, "off")):
        assert report.warnings == ()


def test_a_full_dict_on_one_rank_and_empty_ones_on_others_is_given_to_whoever_asks_so(tmp_path: Path) -> None:
    full: State = {"w": torch.arange(3.0), "deep": {"b": torch.ones(2), "n": 5}, "list": [torch.ones(1)]}

    def part(rank: int) -> State:
        return {"model": full if rank == 0 else {}, "more": {"deep": full["deep"] if rank == 1 else {}}}

    run_ranks(3, lambda group: reknit.save(tmp_path / "x", part(group.rank), group=group))
    reknit.save(tmp_path / "whole", {"model": full, "more": {"deep": full["deep"]}})
    for name in ("x", "whole"):
        for size in (1, 2, 3):

            def rank(group: Group) -> None:
                wanted = part(group.rank)
                if group.size == 1:
                    wanted["more"] = {"deep": full["deep"]}
                target = empty(wanted)
                reknit.load(tmp_path / name, target, group=group)  # noqa: B023
                assert_same(target, wanted)

            run_ranks(size, rank)


def test_an_empty_dict_in_the_place_of_what_no_rank_takes_is_no_excuse(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"model": {"w": torch.ones(1)}})
    with pytest.raises(reknit.MismatchError, match="unexpected: model/w"):
        reknit.load(tmp_path / "x", {"model": {}})
    reknit.save(tmp_path / "y", {"model": {"deep": {}, "deeper": 3}})
    with pytest.raises(reknit.MismatchError, match=r"unexpected: model/deep:"):
        reknit.load(tmp_path / "y", {"model": {"deeper": 0}})


def test_the_index_can_be_rebuilt_though_ranks_keep_tensors_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, lambda group: reknit.save(tmp_path / "x", drawn(group.rank), group=group))
    assert main(["verify", str(tmp_path / "x"), "--rebuild-index"]) == 0, capsys.readouterr()
