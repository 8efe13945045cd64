"""Loads that would do less than their caller expects: patterns that match nothing, and loads of nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.testing.world import run_ranks
from tests.running.cases import one_by_one, one_by_one_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group

Options = reknit.LoadOptions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = {"body.weight": np.ones(4), "head.weight": np.ones(2)}
    reknit.save(
        tmp_path / "x", {"model": model, "ema": {"body.weight": np.ones(4)}, "progress": {"epoch": 3}}
    )
    return tmp_path / "x"


def target() -> dict[str, Any]:
    return {"model": {"body.weight": np.zeros(4), "head.weight": np.zeros(2)}}


def test_a_lenient_load_that_restores_no_tensor_is_an_error_and_changes_nothing(path: Path) -> None:
    state = {"model": {"corpus.weight": np.zeros(4)}, "progress": {"epoch": 0}}
    for strict in (False, ["!model/*"]):
        with pytest.raises(reknit.MismatchError, match="no tensor of the target would be restored") as caught:
            reknit.load(path, state, strict=strict)
        assert "model/corpus.weight: the checkpoint does not have it" in caught.value.message
        assert "model/corpus.weight: did you mean 'model/" in str(caught.value.remedy)
        assert state["progress"] == {"epoch": 0}


def test_a_lenient_load_in_which_nothing_has_the_right_shape_says_so(path: Path) -> None:
    with pytest.raises(
        reknit.MismatchError, match=r"model/body\.weight: its shape is \[4\] in the checkpoint"
    ):
        reknit.load(path, {"model": {"body.weight": np.zeros(5)}}, strict=False)


def test_one_tensor_on_any_rank_is_enough(path: Path) -> None:
    def act(group: Group) -> tuple[str, ...]:
        name = "head.weight" if group.rank else "new.weight"
        report = reknit.load(path, {"model": {name: np.zeros(2)}}, strict=False, group=group)
        return report.restored

    assert run_ranks(2, act) == [(), ("model/head.weight",)]


def test_a_state_without_tensors_may_find_nothing_which_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert reknit.load(path, {"scheduler": {"last": 1}}, strict=False).restored == ()
    assert "is done, but nothing was restored: scheduler/last is missing" in caplog.text
    caplog.clear()
    reknit.load(path, {"progress": {"epoch": 1, "more": 2}}, strict=False)
    reknit.load(path, {"model": {}}, strict=False)
    assert caplog.text == ""


def test_a_checkpoint_without_tensors_may_restore_values_alone(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"progress": {"epoch": 3}})
    state = target() | {"progress": {"epoch": 0}}
    reknit.load(tmp_path / "x", state, strict=False)
    assert state["progress"] == {"epoch": 3}
    with pytest.raises(reknit.MismatchError, match="no tensor of the target"):
        reknit.load(tmp_path / "x", target(), strict=False)


def test_a_pattern_that_matches_nothing_asks_for_the_nearest(path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strict": ["model/*", "emma/*"]}, "strict: the pattern 'emma/*' .*: did you mean 'ema/*'?"),
        (
            {"options": Options(allow_shape_mismatch=("model/haed.weight",))},
            "allow_shape_mismatch: the pattern 'model/haed.weight' .*: did you mean 'model/head.weight'?",
        ),
        ({"options": Options(only=("modle/*",))}, "only: the pattern 'modle/*' .*: did you mean 'model/*'?"),
    ]
    for given, meant in one_by_one(cases):
        before, _, after = meant.partition(" .*")
        with pytest.raises(reknit.MismatchError, match="in 1 place") as caught:
            reknit.load(path, target(), **given)
        assert before in caught.value.message
        assert after in caught.value.message


def test_an_exception_that_matches_nothing_is_named_where_a_load_does_not_fit_and_harmless_elsewhere(
    path: Path,
) -> None:
    cases: list[tuple[str, str]] = [
        ("!modle/*", "strict: the pattern 'modle/*' .*: did you mean 'model/*'?"),
        ("!head.*", "strict: the pattern 'head.*' .*: did you mean 'model/head.*'?"),
        ("!*.wieght", "strict: the pattern '*.wieght' .*: did you mean '*.weight'?"),
        ("!zzz", "strict: the pattern 'zzz' .*: the names are 'model/body.weight', "),
    ]
    for pattern, meant in one_by_one(cases):
        state = target()
        report = reknit.load(path, state, strict=[pattern])
        assert (report.missing, report.unexpected) == ((), ())
        state["model"]["new.weight"] = np.zeros(1)
        before, _, after = meant.partition(" .*")
        with pytest.raises(reknit.MismatchError, match="in 2 places") as caught:
            reknit.load(path, state, strict=[pattern])
        first, second = caught.value.message.splitlines()[1:]
        assert before in first
        assert after in first
        assert "model/new.weight" in second
        assert reknit.load(path, state, strict=[pattern, "!model/new.*"]).missing == ("model/new.weight",)


def test_a_pattern_may_mean_what_only_the_checkpoint_has_or_a_whole_item(tmp_path: Path) -> None:
    cases: list[Any] = [
        ["!model/old.*"],
        ["!ema/body.*"],
        ["!ema/*", "!model/old.*"],
        ["!progress/*"],
        ["!empty/*"],
        ["!*"],
    ]
    for strict, folder in one_by_one_in(tmp_path, cases):
        model = target()["model"]
        saved = {
            "model": model | {"old.w": np.ones(1)},
            "ema": {"body.w": np.ones(1)},
            "progress": {"epoch": 3},
        }
        reknit.save(folder / "x", saved | {"empty": {}})
        state = {
            "model": model if "model" in str(strict) or strict == ["!*"] else model | {"old.w": np.ones(1)}
        }
        reknit.load(folder / "x", state | {"empty": {}} if "empty" in str(strict) else state, strict=strict)


def test_patterns_are_judged_by_the_names_of_all_ranks(path: Path) -> None:
    def act(group: Group) -> None:
        name = ("body", "head")[group.rank]
        state = {"model": {f"{name}.weight": np.zeros(4 - 2 * group.rank), f"{name}.new": np.zeros(1)}}
        options = Options(
            only=("model/body.*", "model/head.*"), allow_shape_mismatch=("model/head.w*", "model/body.w*")
        )
        strict = ["!model/head.new", "!model/body.new"]
        reknit.load(path, state, strict=strict, options=options, group=group)
        calls: list[Callable[[], object]] = [
            lambda: reknit.load(path, state, strict=["!model/tail.new"], options=options, group=group),
            lambda: reknit.load(path, state, options=Options(only=("model/tail.*",)), group=group),
        ]
        for call in calls:
            with pytest.raises(reknit.MismatchError, match=r"the pattern 'model/tail\.") as caught:
                call()
            assert "(rank" not in caught.value.message.splitlines()[1]

    run_ranks(2, act)


def test_a_rule_may_be_for_the_items_of_another_rank(path: Path) -> None:
    def act(group: Group) -> None:
        item, name = (("model", "trunk.weight"), ("progress", "epoch"))[group.rank]
        state: dict[str, Any] = {item: {name: 0 if group.rank else np.zeros(4)}}
        if not group.rank:
            state[item]["head.weight"] = np.zeros(2)
        rules = [reknit.transforms.rename("body.{x}", "trunk.{x}")]
        reknit.load(path, state, options=Options(transforms=rules), group=group)
        assert group.rank or state["model"]["trunk.weight"].all()
        rules.append(reknit.transforms.rename("haed.{x}", "nose.{x}"))
        with pytest.raises(reknit.MismatchError, match="matches no name") as caught:
            reknit.load(path, state, options=Options(transforms=rules), group=group)
        assert "did you mean 'head.{x}'?" in str(caught.value.remedy)

    run_ranks(2, act)


def test_rules_that_match_nothing_ask_for_the_nearest_unless_they_are_optional(path: Path) -> None:
    t = reknit.transforms
    rules: dict[str, Any] = {
        "did you mean 'body.{x}'?": t.rename("bdoy.{x}", "trunk.{x}"),
        "did you mean 'head.weight'?": t.drop("model/head.weight"),
        "the names are 'body.weight', 'head.weight'": t.rewrite("xyz", "abc"),
        "did you mean 'model/'?": t.names({"modle/": "m/"}),
        "did you mean 'model/head.weight'?": t.names({"model/head.wieght": "model/x"}),
        "'ema/body.weight'": t.names(rewrite=[("xyz", "abc")]),
    }
    for meant, rule in rules.items():
        with pytest.raises(reknit.MismatchError, match="matches no name in the checkpoint") as caught:
            reknit.load(path, target(), options=Options(transforms=[rule]))
        assert meant in str(caught.value.remedy)
    optional: list[Any] = [
        t.names({"modle/": "m/"}, optional=True),
        t.rename("bdoy.{x}", "trunk.{x}", optional=True),
    ]
    reknit.load(path, target(), options=Options(transforms=optional))


def test_items_and_patterns_of_other_calls_ask_for_the_nearest_too(path: Path) -> None:
    with pytest.raises(reknit.UsageError) as wrong:
        reknit.load(path, target(), items=["modle"])
    assert wrong.value.remedy == "did you mean 'model'?"
    with reknit.open(path) as checkpoint, pytest.raises(reknit.MismatchError) as caught:
        checkpoint.read_all(only=["model/haed.*"])
    assert "did you mean 'model/head.*'?" in str(caught.value.remedy)
