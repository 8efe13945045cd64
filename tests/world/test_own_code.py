"""Exceptions in code of users: each is an error on all ranks, which names the object and the cause."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import reknit
from reknit.frameworks.custom import registered
from reknit.frameworks.stateful import Kept
from reknit.testing.world import run_ranks
from tests.storage.process_memory import ProcessMemory
from tests.world.planted import AFTER_TENSORS, ON_LOAD, ON_SAVE, Bag, Bags, Keeper, PlantedError, planted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.comm.group import Group


def reported(error: BaseException, *, own: bool) -> str:
    """Check the form of an error, and return its text."""
    assert isinstance(error, reknit.ReknitError)
    assert "PlantedError: boom" in error.message
    assert error.remedy
    if own:
        cause = error.__cause__
        assert isinstance(cause, PlantedError), cause
    return str(error)


def of_all(act: Callable[[dict[str, Any], Group | None], object], make: Callable[[], Any]) -> list[str]:
    """Return the error of a single process, and those of two ranks of which one has the object."""
    with pytest.raises(reknit.ReknitError) as alone:
        act({"odd": make()}, None)

    def rank(group: Group) -> str:
        with pytest.raises(reknit.ReknitError) as caught:
            act({"odd": make()} if group.rank else {"other": 1}, group)
        return reported(caught.value, own=group.rank == 1)

    texts = run_ranks(2, rank)
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0]
    return [reported(alone.value, own=True), texts[0]]


def saves(state: dict[str, Any], group: Group | None, *, wait: bool = True) -> None:
    reknit.save("process://planted/x", state, group=group, wait=wait).result()


def saves_in_a_run(state: dict[str, Any], group: Group | None) -> None:
    with reknit.Checkpointer("process://planted", group=group, wait=True) as run:
        run.save(1, state, force=True)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    ProcessMemory.clear("planted")


@pytest.mark.parametrize(
    "act", [saves, partial(saves, wait=False), saves_in_a_run], ids=["now", "later", "run"]
)
def test_an_exception_of_an_object_that_is_saved_is_an_error_that_names_it(
    act: Callable[[dict[str, Any], Group | None], object],
) -> None:
    for kind, make in ON_SAVE.items():
        for text in of_all(act, make):
            assert "odd" in text, kind
        assert reknit.close()


@pytest.mark.parametrize("failing", ["matches", "holdings", "restore"])
def test_an_exception_of_a_framework_of_a_user_is_an_error(failing: str) -> None:
    with registered(Bags()):
        saves({"odd": Bag(), "w": torch.ones(2)}, None)
    live = torch.zeros(2)
    with registered(Bags(failing)), pytest.raises(reknit.ReknitError) as caught:
        reknit.load("process://planted/x", {"odd": Bag(), "w": live})
    reported(caught.value, own=True)
    assert live.tolist() == [0, 0]
    if failing == "restore":
        return
    with registered(Bags(failing)), pytest.raises(reknit.ReknitError) as caught:
        saves({"odd": Bag()}, None)
    reported(caught.value, own=True)


def loads(state: dict[str, Any], group: Group | None) -> None:
    reknit.load("process://planted/x", state, group=group)


def resumes(state: dict[str, Any], group: Group | None) -> None:
    with reknit.Checkpointer("process://planted", group=group) as run:
        run.resume(state)


def save_for_both(saved: Callable[[], Any], *, ranks: int) -> None:
    def rank(group: Group) -> None:
        state = {"w": torch.ones(2), "good": Keeper(7), "odd": saved()}
        with reknit.Checkpointer("process://planted", group=group, wait=True) as run:
            run.save(1, state, force=True)
        reknit.save("process://planted/x", state, group=group)

    run_ranks(ranks, rank)


@pytest.mark.parametrize(("act", "ranks"), [(loads, 1), (loads, 2), (resumes, 2)])
def test_an_exception_of_an_object_that_is_loaded_is_an_error_and_changes_no_tensor_on_any_rank(
    ranks: int, act: Callable[[dict[str, Any], Group | None], object]
) -> None:
    for kind, (saved, target) in ON_LOAD.items():
        save_for_both(saved, ranks=ranks)

        def rank(group: Group, saved: Any = saved, target: Any = target) -> str:
            good, live, is_odd = Keeper(0), torch.zeros(2), group.rank == ranks - 1
            state = {"w": live, "good": good, "odd": target() if is_odd else saved()}
            with pytest.raises(reknit.ReknitError) as caught:
                act(state, group)
            assert live.tolist() == [0, 0]
            text = reported(caught.value, own=is_odd)
            if good.state != 0:
                assert "loaded before it: good" in text
            unchanged = "reknit had changed no tensor of the target yet" in text
            assert unchanged != ("nothing was changed" in text)
            return text

        texts = run_ranks(ranks, rank)
        assert len(set(texts)) == 1, kind
        assert "odd" in texts[0], kind
        ProcessMemory.clear("planted")


def test_an_exception_of_code_that_needs_the_tensors_says_that_the_target_is_partly_written() -> None:
    for kind, (saved, target) in AFTER_TENSORS.items():
        save_for_both(saved, ranks=1)
        with pytest.raises(reknit.ReknitError) as caught:
            loads({"w": torch.zeros(2), "good": Keeper(0), "odd": target()}, None)
        text = reported(caught.value, own=True)
        assert "odd" in text, kind
        assert "the target is partly written" in text, kind
        ProcessMemory.clear("planted")


def test_objects_that_another_rank_has_alone_are_loaded_before_tensors_of_any_rank() -> None:
    save_for_both(Keeper, ranks=1)

    def rank(group: Group) -> str:
        live = torch.zeros(2)
        more = {"odd": planted(Keeper, "load_state_dict")} if group.rank else {}
        with pytest.raises(reknit.ReknitError) as caught:
            loads({"w": live, **more}, group)
        assert live.tolist() == [0, 0]
        return reported(caught.value, own=group.rank == 1)

    first, second = run_ranks(2, rank)
    assert first == second
    assert (
        "other ranks may have loaded their objects; reknit had changed no tensor of the target yet" in first
    )


def test_a_scaler_that_was_disabled_does_not_load_into_one_that_is_not() -> None:
    saved: dict[str, Any] = {"model": nn.Linear(1, 1), "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    reknit.save("process://planted/x", saved)
    target: dict[str, Any] = {"model": nn.Linear(1, 1), "scaler": torch.amp.GradScaler("cpu")}
    before = target["model"].weight.item()
    with pytest.raises(reknit.ReknitError, match="scaler"):
        reknit.load("process://planted/x", target)
    assert target["model"].weight.item() == before


def test_an_interrupt_is_raised_as_it_is() -> None:
    error: type[BaseException]

    class Interrupted(Keeper):
        def load_state_dict(self, state: Any) -> None:
            raise error

        def state_dict(self) -> Any:
            raise error

    save_for_both(Keeper, ranks=1)
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            loads({"w": torch.zeros(2), "good": Keeper(), "odd": Interrupted()}, None)
        with pytest.raises(error):
            saves({"odd": Interrupted()}, None)


@pytest.mark.parametrize(("share", "everywhere"), [("always", False), ("never", True)])
def test_tensors_of_objects_are_read_once_for_ranks_that_have_the_same(share: Any, everywhere: bool) -> None:
    model, average = torch.arange(70_000.0), torch.arange(90_000.0)
    reknit.save("process://planted/x", {"w": model, "average": Keeper(average)})

    def rank(group: Group) -> int:
        live, keeper = torch.zeros(70_000), Keeper(torch.zeros(90_000))
        state = {"w": live, "average": keeper} if everywhere or group.rank else {"w": live}
        options = reknit.LoadOptions(share=share)
        report = reknit.load("process://planted/x", state, group=group, options=options)
        assert torch.equal(live, model)
        assert "average" not in state or torch.equal(keeper.state, average)
        return report.nbytes_read

    read = sum(run_ranks(2, rank))
    once, twice = 4 * (70_000 + 90_000), 4 * (2 * 70_000 + (90_000 if not everywhere else 2 * 90_000))
    assert read == pytest.approx(once if share == "always" else twice, rel=0.1)


class Plain:
    """An object without a state."""


class PassesOn:
    """A wrapper that has the state of the object in it, as wrappers of data loaders do."""

    def __init__(self, inner: Any, attribute: str = "state_dict") -> None:
        self.inner, self.attribute = inner, attribute

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)

    def state_dict(self) -> Any:
        return getattr(self, self.attribute) if self.attribute != "state_dict" else self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda: PassesOn(Plain()),
        lambda: PassesOn(Plain(), "kept_state"),
        lambda: PassesOn(PassesOn(Plain(), "kept_state")),
        lambda: reknit.PerRank(PassesOn(Plain())),
        lambda: [PassesOn(Plain())],
    ],
)
def test_a_wrapper_around_an_object_without_a_state_is_an_error_about_that_object(wrapper: Any) -> None:
    with pytest.raises(reknit.ReknitError) as caught:
        reknit.save("process://planted/x", {"odd": wrapper()})
    assert "could not be saved: it passes on the state of a Plain, which has none" in caught.value.message
    assert "wrap an object that has a state" in (caught.value.remedy or "")
    reknit.save("process://planted/x", {"odd": PassesOn(PassesOn(Kept({"n": 1})))})
    with pytest.raises(reknit.ReknitError, match="it passes on the state of a Plain, which has none"):
        reknit.load("process://planted/x", {"odd": PassesOn(PassesOn(Plain()))})


def test_an_attribute_error_of_other_code_is_reported_as_it_is() -> None:
    class Odd:
        def state_dict(self) -> Any:
            return self.missing  # type: ignore[attr-defined]

        def load_state_dict(self, state: Any) -> None:
            pass

    with pytest.raises(
        reknit.ReknitError, match="could not be saved: AttributeError: 'Odd' object"
    ) as caught:
        reknit.save("process://planted/x", {"odd": Odd()})
    assert "correct the code that raised it" in (caught.value.remedy or "")
