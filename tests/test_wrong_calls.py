"""Mistakes of newcomers: each error names the mistake, its place, and the right call."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
import re
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import reknit
from reknit.engine.loading.read import RangeReader
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group

STATE: dict[str, Any] = {"model": {"w": np.ones(4)}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Save a checkpoint, and return its path."""
    reknit.save(tmp_path / "runs" / "one", STATE, step=7)
    return tmp_path / "runs" / "one"


def calls(path: Path, place: Any, options: Any = None) -> list[Callable[[], object]]:
    """Return every call that takes a place, saves and loads alike, with `place`."""
    saved = {} if options is None else {"options": options}
    return [
        lambda: reknit.save(place, STATE, **saved),
        lambda: reknit.prepare(place, STATE, **saved),
        lambda: reknit.promote(path, place, **saved),
        lambda: reknit.load(place, STATE, **saved),
        lambda: reknit.open(place, **saved),
        lambda: reknit.verify(place, **saved),
    ]


def test_a_place_that_is_none_says_what_to_give(path: Path, tmp_path: Path) -> None:
    wrong: list[Any] = [None, b"runs/one", 3, ""]
    for place in wrong:
        everywhere = calls(path, place)
        everywhere.append(functools.partial(reknit.latest, place))
        for call in everywhere:
            with pytest.raises(reknit.UsageError, match="a place to store is needed") as caught:
                call()
            assert "give a path or a URL" in str(caught.value), place
        with pytest.raises(reknit.UsageError):
            reknit.save(place, STATE, wait=False).result()
    with pytest.raises(reknit.UsageError, match=r"reknit.latest returns None where there is no checkpoint"):
        reknit.load(reknit.latest(tmp_path / "nosuch"), STATE)  # type: ignore[arg-type]
    with pytest.raises(reknit.UsageError, match=r"os\.fsdecode"):
        reknit.open(b"runs")  # type: ignore[arg-type]


def test_options_of_another_type_say_which_are_needed(path: Path) -> None:
    kinds = ["SaveOptions"] * 3 + ["LoadOptions"] * 3
    for wrong in ({}, {"threads": 2}, "fast", 3, reknit.CommOptions()):
        for call, kind in zip(calls(path, path, wrong), kinds, strict=True):
            with pytest.raises(reknit.UsageError, match=f"options is a reknit.{kind} here, not a ") as caught:
                call()
            assert f"pass options=reknit.{kind}(" in str(caught.value.remedy), wrong
    with pytest.raises(reknit.UsageError, match=r"options is a reknit\.CommOptions"):
        reknit.connect(0, 1, at=path, options={})  # type: ignore[arg-type]


def test_options_of_the_other_direction_are_refused_and_a_dict_is_spelled_out(path: Path) -> None:
    with pytest.raises(reknit.UsageError, match="not a LoadOptions"):
        reknit.save(path, STATE, options=reknit.LoadOptions())  # type: ignore[arg-type]
    with pytest.raises(reknit.UsageError, match="not a SaveOptions"):
        reknit.load(path, STATE, options=reknit.SaveOptions())  # type: ignore[arg-type]
    with pytest.raises(reknit.UsageError) as caught:
        reknit.load(path, STATE, options={"cast": True, "threads": 2})  # type: ignore[arg-type]
    assert caught.value.remedy == "pass options=reknit.LoadOptions(cast=True, threads=2)"


def test_a_knob_of_another_type_is_named() -> None:
    cases: list[tuple[type[Any], dict[str, Any], str]] = [
        (reknit.SaveOptions, {"progress": "no"}, "progress is True or False, not 'no'"),
        (reknit.SaveOptions, {"allow_pickle": "no"}, "allow_pickle is True or False"),
        (reknit.SaveOptions, {"threads": "4"}, "threads is a whole number, or None, not '4'"),
        (reknit.SaveOptions, {"threads": True}, "threads is a whole number"),
        (reknit.SaveOptions, {"inflight_nbytes": 1e9}, "inflight_nbytes is a whole number"),
        (reknit.SaveOptions, {"timeout_s": "60"}, "timeout_s is a number, not '60'"),
        (reknit.SaveOptions, {"events": 3}, "events is a path, a sink .* or a list of these, not 3"),
        (reknit.SaveOptions, {"comm": {"fan_out": 2}}, "comm is a reknit.CommOptions"),
        (reknit.LoadOptions, {"cast": "no"}, "cast is True or False"),
        (reknit.LoadOptions, {"gap_nbytes": "1"}, "gap_nbytes is a whole number"),
        (reknit.LoadOptions, {"comm": None}, "comm is a reknit.CommOptions"),
        (reknit.CommOptions, {"fan_out": "16"}, "fan_out is a whole number"),
    ]
    for kind, knobs, says in cases:
        with pytest.raises(reknit.UsageError, match=says):
            kind(**knobs)
    # Numbers of numpy and whole seconds are right.
    reknit.SaveOptions(threads=np.int64(2), timeout_s=60, exit_wait_s=np.float32(1))
    reknit.LoadOptions(gap_nbytes=None, threads=None)


def test_a_flag_that_is_neither_true_nor_false_is_refused(path: Path) -> None:
    new = path.with_name("new")
    flagged: list[tuple[str, Callable[[Any], object]]] = [
        ("strict", lambda wrong: reknit.load(path, STATE, strict=wrong)),
        ("overwrite", lambda wrong: reknit.save(path, STATE, overwrite=wrong)),
        ("wait", lambda wrong: reknit.save(new, STATE, wait=wrong).result()),
        ("overwrite", lambda wrong: reknit.promote(path, new, overwrite=wrong)),
    ]
    for (name, call), wrong in itertools.product(flagged, ("no", 1, None)):
        with pytest.raises(reknit.UsageError, match=f"{name} is True or False,.* not {wrong!r}"):
            call(wrong)
    odd: list[Any] = [[], [""], ["!"], [1], {"model/*"}]
    for patterns in odd:
        with pytest.raises(reknit.UsageError, match="strict is True or False, or a list of patterns"):
            reknit.load(path, STATE, strict=patterns)
    assert not new.exists()
    # A flag of numpy is a flag.
    reknit.save(path, STATE, wait=np.int64(8) % 2 == 0, overwrite=np.bool_(True))  # type: ignore[arg-type]
    reknit.load(path, STATE, strict=np.bool_(True))  # type: ignore[arg-type]


def test_options_in_the_place_of_the_step_are_told_to_come_by_name(path: Path) -> None:
    with pytest.raises(reknit.UsageError, match=r"options=\.\.\.") as caught:
        reknit.save(path, STATE, step=reknit.SaveOptions())  # type: ignore[arg-type]
    assert len(caught.value.message) < 200


def test_items_and_groups_that_are_none_are_refused(path: Path) -> None:
    with pytest.raises(reknit.UsageError, match="items is a list of names, not 3"):
        reknit.load(path, STATE, items=3)  # type: ignore[arg-type]
    for group in ("world", [0, 1]):
        with pytest.raises(reknit.UsageError, match="group is a process group of torch or a group of"):
            reknit.load(path, STATE, group=group)  # type: ignore[arg-type]


# What is there instead of a checkpoint?


def test_the_newest_of_a_checkpoint_is_refused_and_led_to_the_folder_above(path: Path) -> None:
    with pytest.raises(reknit.UsageError, match="is a checkpoint, and latest looks for") as caught:
        reknit.latest(path)
    assert str(caught.value).endswith(f"or pass the folder above: {path.parent}")
    assert reknit.latest(path.parent) == str(path)


# What cannot be saved, or does not fit?


@dataclasses.dataclass
class Config:
    width: int = 1


def test_a_value_that_cannot_be_saved_is_told_what_to_save_instead(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (DataLoader([1, 2]), "StatefulDataLoader"),  # type: ignore[arg-type]
        ((n for n in range(3)), "save its position as a number"),
        (iter([1, 2]), "save its position as a number"),
        (Config(), r"dataclasses\.asdict\(\)"),
        (torch.nn.Linear, "put an object of this class into the state"),
        (torch.Generator(), r"save the result of its get_state\(\)"),
        (object(), "save a plain value"),
    ]
    for value, says in cases:
        with pytest.raises(reknit.errors.StateError, match=says) as caught:
            reknit.save(tmp_path / "x", {"extra": {"it": value}})
        assert caught.value.message.startswith("extra/it cannot be saved"), value
        assert ("allow_pickle" in str(caught.value)) == (type(value) is object)


def test_a_vocabulary_that_grew_is_told_what_lets_it_grow(path: Path) -> None:
    hint = "LoadOptions(allow_shape_mismatch=...) takes the common part"
    state = {"model": {"w": np.zeros(6)}}
    with pytest.raises(reknit.MismatchError) as caught:
        reknit.load(path, state)
    assert hint in str(caught.value)
    options = reknit.LoadOptions(allow_shape_mismatch=("model/w",))
    reknit.load(path, state, options=options)
    assert state["model"]["w"].tolist() == [1, 1, 1, 1, 0, 0]
    for given in (None, options):
        with pytest.raises(reknit.MismatchError) as caught:
            reknit.load(path, {"model": {"w": np.zeros((4, 1))}}, options=given)
        assert hint not in str(caught.value), "of another number of dimensions nothing can be taken"


def test_one_thing_that_does_not_fit_is_one_place(path: Path) -> None:
    with pytest.raises(reknit.MismatchError, match="does not fit the target in 1 place; nothing was changed"):
        reknit.load(path, {"model": {"w": np.zeros((4, 1))}})


def test_a_name_that_is_not_there_is_led_to_one_that_is(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"model": {"layer.weight": np.ones(2), "bias": np.ones(1), "epoch": 3}})
    for item, fqn, says in [
        ("modle", "layer.weight", "no item 'modle'.*its items are 'model'"),
        ("model", "layer.wieght", r"no tensor 'layer\.wieght' in item.*did you mean 'layer\.weight'\?"),
        ("model", "epoch", "no tensor 'epoch'.*it is a value and no tensor"),
        ("model", "qqqq", "no tensor 'qqqq'.*-> `tensors` lists its tensors"),
    ]:
        with pytest.raises(reknit.MismatchError) as caught:
            reknit.open(tmp_path / "x").read(item, fqn)
        assert re.search(says, str(caught.value), re.DOTALL)


# How is it told?


def test_what_the_system_refuses_is_told_once_with_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(reknit.StorageError, match=r"ulimit -f.*max_file_nbytes") as caught:
        reknit.save(tmp_path / "x", {"model": {"w": np.zeros(1 << 18)}})
    reported = "".join(traceback.format_exception(caught.value))
    assert reported.count("File too large") == 1
    assert not (tmp_path / "x" / "manifest.json").exists()


def test_a_load_that_is_interrupted_says_that_the_target_is_a_mixture(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RangeReader.run

    def interrupted(self: RangeReader, *args: Any) -> None:
        run(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(RangeReader, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reknit.load(path, {"model": {"w": np.zeros(4)}})
    assert caplog.messages == [
        f"the load of {path} was ended by KeyboardInterrupt; the target is partly written"
    ]


def test_what_fails_in_one_process_is_told_once_and_shortly(path: Path) -> None:
    failing: list[Callable[[], object]] = [
        lambda: reknit.save(path, STATE),
        lambda: reknit.save(path.with_name("two"), {"x": object()}),
        lambda: reknit.load(path.with_name("two"), STATE),
        lambda: reknit.load(path, {"model": torch.nn.Linear(2, 2)}),
    ]
    for call in failing:
        with pytest.raises(reknit.ReknitError) as caught:
            call()
        reported = "".join(traceback.format_exception(caught.value))
        assert reported.count(caught.value.message) == 1
        assert "direct cause" not in reported
        assert reported.count("\n  File ") < 12


# Options that mean nothing in a call.


def test_a_checkpoint_is_opened_with_names_only_and_gaps_are_read_over_only_without_checks(
    path: Path,
) -> None:
    with pytest.raises(reknit.UsageError, match="gap_nbytes means something with verify='off' only"):
        reknit.LoadOptions(gap_nbytes=0)
    rules = reknit.LoadOptions(transforms=[reknit.transforms.rename("w", "v")])
    with pytest.raises(reknit.UsageError, match="it takes names only"):
        reknit.open(path, options=rules)


def test_every_rank_hears_of_the_wrong_options_of_one(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", STATE)

    def act(group: Group) -> None:
        wrong: Any = {"timeout_s": 1} if group.rank == 1 else None
        calls: list[Callable[[], object]] = [
            lambda: reknit.save(tmp_path / "a", STATE, options=wrong, group=group),
            lambda: reknit.save(tmp_path / "b", STATE, options=wrong, group=group, wait=False).result(60),
            lambda: reknit.prepare(tmp_path, STATE, options=wrong, group=group),
            lambda: reknit.load(tmp_path / "x", STATE, options=wrong, group=group),
        ]
        for call in calls:
            with pytest.raises(reknit.UsageError, match="options is a reknit") as reported:
                call()
            assert reported.value.rank == 1

    run_ranks(2, act)
    reknit.close()


def test_names_are_one_rule_and_the_first(path: Path) -> None:
    names, rename = reknit.transforms.names({"a": "b"}), reknit.transforms.rename("w", "v")
    wrong: list[list[Any]] = [[rename, names], [names, names]]
    for rules in wrong:
        with pytest.raises(reknit.UsageError, match=r"transforms\.names is the first rule"):
            reknit.load(path, STATE, options=reknit.LoadOptions(transforms=rules))
