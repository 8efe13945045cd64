"""The example passes the shipped suite, and frameworks with one fault each do not."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from reknit.errors import ReknitError
from reknit.frameworks.custom import Held, Value, registered
from reknit.testing.framework_suite import FrameworkSuite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reknit.frameworks.custom import CustomFramework

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_framework.py"


def imported() -> Any:
    spec = importlib.util.spec_from_file_location("custom_framework", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = imported()


class TableSuite(FrameworkSuite):
    """The suite for the tables of the example."""

    def framework(self) -> CustomFramework:
        return example.Tables()  # type: ignore[no-any-return]

    def make(self, rank: int, size: int, seed: int) -> Any:
        table = example.Table(rank, size, lookups=seed + 3)
        for start, block in table.blocks.items():
            block[...] = np.arange(block.size).reshape(block.shape) + 100 * start + 7000 * seed
        return table

    def contents(self, parts: Sequence[Any]) -> Mapping[str, Any]:
        rows = np.full((example.ROWS, example.WIDTH), np.nan, np.float32)
        for part in parts:
            for start, block in part.blocks.items():
                rows[start : start + len(block)] = block
        lookups = {part.lookups for part in parts}
        return {"rows": rows, "lookups": lookups.pop() if len(lookups) == 1 else lookups}


class TestTheExample(TableSuite):
    pass


class Wrong:
    """The example's framework, with one thing changed."""

    def __init__(self) -> None:
        self.right = example.Tables()

    def matches(self, value: Any) -> bool:
        return bool(self.right.matches(value))

    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        yield from self.right.holdings(value, rank, size)

    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        self.right.restore(value, held, values)


class InTorch(Wrong):
    """A right framework: the same memory as tensors, of which some are strided."""

    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        for one in super().holdings(value, rank, size):
            if not isinstance(one, Held):
                yield one
                continue
            for column in range(one.lengths[1]):
                memory = torch.from_numpy(one.memory)[:, column : column + 1]
                yield replace(
                    one, offsets=(one.offsets[0], column), lengths=(one.lengths[0], 1), memory=memory
                )


class Greedy(Wrong):
    def matches(self, value: Any) -> bool:
        return not isinstance(value, dict) or bool(value)


class Shifted(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        for one in super().holdings(value, rank, size):
            if isinstance(one, Held):
                one = replace(one, offsets=((one.offsets[0] + 2) % example.ROWS, 0))
            yield one


class Forgetful(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        for one in super().holdings(value, rank, size):
            if not (isinstance(one, Held) and one.offsets[0] == example.ROWS - 2):
                yield one


class Silent(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        yield from (one for one in super().holdings(value, rank, size) if isinstance(one, Held))


class Twice(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        yield from super().holdings(value, rank, size)
        yield next(super().holdings(value, rank, size))


class Counting(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        value.lookups += 1
        yield from super().holdings(value, rank, size)


class Copying(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        for one in super().holdings(value, rank, size):
            yield replace(one, memory=one.memory.copy()) if isinstance(one, Held) else one


class Boasting(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        for one in super().holdings(value, rank, size):
            yield replace(one, replicas=tuple(range(size))) if isinstance(one, Held) else one


class Named(Wrong):
    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        for one in super().holdings(value, rank, size):
            yield replace(one, name=f"{one.name}-of-{size}")


class Idle(Wrong):
    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        pass


class Resetting(Wrong):
    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        value.lookups = values.get("lookups", 0)


class Hasty(Wrong):
    """A framework that changes its value when it is asked for the wanted parts."""

    def holdings(self, value: Any, rank: int, size: int) -> Iterator[Held | Value]:
        caller = inspect.stack()
        if any(frame.function == "wanted" for frame in caller):
            value.lookups = 0
        yield from super().holdings(value, rank, size)


FOUND: dict[type[Wrong], str] = {
    Greedy: "test_it_takes_its_own_values_and_no_others",
    Shifted: "test_the_boxes_of_all_ranks_are_the_whole_and_copies_are_equal",
    Silent: "test_all_that_a_value_has_is_given_under_its_name",
    Forgetful: "test_the_boxes_of_all_ranks_are_the_whole_and_copies_are_equal",
    Twice: "test_no_rank_gives_a_name_twice",
    Counting: "test_collecting_changes_nothing_and_finds_the_same_again",
    Copying: "test_a_checkpoint_loads_on_any_number_of_ranks",
    Boasting: "test_ranks_that_are_said_to_hold_a_box_hold_it",
    Named: "test_names_are_the_same_on_any_number_of_ranks",
    Idle: "test_a_checkpoint_loads_on_any_number_of_ranks",
    Resetting: "test_what_is_not_to_be_loaded_stays",
    Hasty: "test_a_name_that_the_checkpoint_lacks_is_refused_and_nothing_changes",
}


def passes(suite: FrameworkSuite, name: str, tmp_path: Path) -> bool:
    """Run one test of a suite as pytest would."""
    test = getattr(suite, name)
    needed = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(test).parameters else {}
    try:
        with registered(suite.framework()):
            test(**needed)
    except (AssertionError, ReknitError, pytest.fail.Exception):
        return False
    return True


class InColumnsSuite(TableSuite):
    def framework(self) -> CustomFramework:
        return InTorch()


def test_a_right_framework_whose_memory_is_of_torch_and_strided_passes(tmp_path: Path) -> None:
    tests = sorted(name for name in dir(InColumnsSuite) if name.startswith("test_"))
    assert set(FOUND.values()) < set(tests)
    for name in tests:
        assert passes(InColumnsSuite(), name, tmp_path / name), name


def test_a_framework_that_is_wrong_in_one_way_does_not_pass(tmp_path: Path) -> None:
    class WrongSuite(TableSuite):
        def __init__(self, wrong: type[Wrong]) -> None:
            self.wrong = wrong

        def framework(self) -> CustomFramework:
            return self.wrong()

    for wrong, test in FOUND.items():
        assert not passes(WrongSuite(wrong), test, tmp_path / wrong.__name__), wrong


def test_a_suite_whose_contents_do_not_depend_on_the_seed_does_not_pass(tmp_path: Path) -> None:
    class Blind(TableSuite):
        def contents(self, parts: Sequence[Any]) -> Mapping[str, Any]:
            return {name: 0 for name in super().contents(parts)}

    assert not passes(Blind(), "test_values_of_two_seeds_differ_in_everything", tmp_path)


def test_the_example_runs() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved on 2 ranks, loaded on 3" in done.stdout
