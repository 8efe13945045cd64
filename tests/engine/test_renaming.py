"""Names of the state for the tensors of a checkpoint: the rules, and everything that they change."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reknit
from reknit.engine.stored.renaming import Naming, renamed
from reknit.frameworks.stateful import Accessors
from reknit.testing.world import run_ranks
from reknit.transforms import names
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import TensorSpec
from tests.running.cases import one_by_one
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from reknit.comm.group import Group


def options(**rules: Any) -> reknit.LoadOptions:
    return reknit.LoadOptions(transforms=[names(**rules)])


def naming(rename: Mapping[str, str], *rewrite: tuple[str, str]) -> Naming:
    found = Naming.of(options(rename=rename, rewrite=rewrite))
    assert found is not None
    return found


def test_each_rule_does_what_it_says() -> None:
    cases: list[tuple[dict[str, str], tuple[tuple[str, str], ...], Any, Any]] = [
        ({"model/": "net/"}, (), ("model", "a.b"), ("net", "a.b")),
        ({"model/a.": "model/b."}, (), ("model", "a.w"), ("model", "b.w")),
        ({"model/a.": "model/b."}, (), ("model", "ab.w"), ("model", "ab.w")),
        ({"model/a.": "model/"}, (), ("model", "a.w"), ("model", "w")),
        ({"model/a": "model/b"}, (), ("model", "a.w"), ("model", "a.w")),
        ({"model/": "x/", "model/a.": "y/", "model/a.w": "z/v"}, (), ("model", "a.w"), ("z", "v")),
        ({"model/": "x/", "model/a.": "y/", "model/a.w": "z/v"}, (), ("model", "a.b"), ("y", "b")),
        ({"all/": ""}, (), ("all", "model/w"), ("model", "w")),
        ({"lr": "rate"}, (), ("lr", ""), ("rate", "")),
        ({"lr": "rate/now"}, (), ("lr", ""), ("rate", "now")),
        ({"a/b/c": "a/b/d"}, (), ("a/b", "c"), ("a/b", "d")),
        ({}, ((r"layers\.(\d+)", r"blocks.\1"),), ("m", "layers.10.w"), ("m", "blocks.10.w")),
        ({"m/": "n/"}, (("^n/", "o/"), ("^m/", "p/")), ("m", "w"), ("o", "w")),
        ({}, (("a", "b"), ("b", "c")), ("m", "a"), ("m", "c")),
    ]
    for rename, rewrite, name, new in one_by_one(cases):
        assert naming(rename, *rewrite).apply(name) == new


def test_a_name_without_an_item_is_refused() -> None:
    with pytest.raises(reknit.MismatchError, match="names no item"):
        naming({}, ("^m", "")).apply(("m", "w"))


def test_rules_that_are_none_are_refused_at_once() -> None:
    cases: list[dict[str, Any]] = [
        {"rename": [("a", "b")]},
        {"rename": {"a": 1}},
        {"rename": {"": "b"}},
        {"rename": {"a": ""}},
        {"rename": {"a/": "b"}},
        {"rewrite": "ab"},
        {"rewrite": (("a",),)},
        {"rewrite": (("(", ""),)},
        {"rewrite": (("a", r"\1"),)},
        {"rewrite": (("a", r"\g<x>"),)},
    ]
    for wrong in one_by_one(cases):
        with pytest.raises(reknit.UsageError, match=r"rename|rewrite"):
            names(**wrong)


NAMES = st.lists(
    st.tuples(st.sampled_from(["m", "n"]), st.text("abc.", min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
    unique=True,
)


def index_of(names: Sequence[tuple[str, str]]) -> Index:
    """Return an index in which each tensor has a different chunk for each letter of its name."""
    names = sorted(names)
    tensor = np.repeat(np.arange(len(names)), [len(fqn) for _, fqn in names])
    number = np.arange(len(tensor))
    return Index(
        tuple(TensorEntry(item, fqn, TensorSpec((len(fqn),), "uint8")) for item, fqn in names),
        ("f",),
        tensor,
        (number - np.searchsorted(tensor, tensor))[:, None],
        np.ones((len(tensor), 1), np.int64),
        np.zeros(len(tensor), np.int64),
        number * 10,
        np.ones(len(tensor), np.int64),
    )


@given(NAMES, st.sampled_from([("a", "zz"), ("^m/", "o/"), ("^(.)/(.*)$", r"\1/\2x"), ("b", "")]))
def test_every_tensor_keeps_its_chunks_and_tensors_stay_sorted(
    names: list[tuple[str, str]], rule: tuple[str, str]
) -> None:
    rules = naming({}, rule)
    new = {name: rules.apply(name) for name in names}
    index = index_of(names)
    if len(set(new.values())) < len(names):
        with pytest.raises(reknit.MismatchError, match=r"of two names|matches no name"):
            renamed(rules, ("m", "n"), index, {}, ())
        return
    if new == {name: name for name in names}:
        with pytest.raises(reknit.MismatchError, match="matches no name"):
            renamed(rules, ("m", "n"), index, {}, ())
        return
    found = renamed(rules, ("m", "n"), index, {}, ()).index
    keys = [entry[:2] for entry in found.tensors]
    assert keys == sorted(new.values())
    assert (np.diff(found.tensor) >= 0).all()
    for old, name in new.items():
        before, after = (
            (i.tensors[i.ids[key]].spec, list(i.chunks(i.ids[key])))
            for i, key in ((index, old), (found, name))
        )
        assert before == after


# Through a load.


class Average:
    """An object with a state dict that has tensors in it."""

    def __init__(self, value: float) -> None:
        self.shadow = {"w": torch.full((3,), value), "b": [torch.full((2,), value), 5]}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def state(value: float = 0.0) -> dict[str, Any]:
    return {
        "model": {"b": np.full(2, value), "w": np.full((2, 3), value), "epoch": int(value)},
        "average": Average(value),
        "mine": reknit.PerRank({"v": value}),
        "rate": value,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    old = state(3.0)
    saved = {"net": {"z": old["model"]["b"], "a": old["model"]["w"], "epoch": 3}} | old
    del saved["model"]
    reknit.save(tmp_path / "x", saved)
    return tmp_path / "x"


RULES: dict[str, Any] = {"rename": {"net/z": "model/b", "net/a": "model/w", "net/": "model/"}}


def test_everything_that_a_checkpoint_holds_is_renamed(path: Path) -> None:
    target = {f"new_{item}": value for item, value in state().items()}
    target["model"] = target.pop("new_model")
    rules: dict[str, Any] = {
        "rename": RULES["rename"] | {"average/": "new_average/", "rate": "new_rate"},
        "rewrite": (("^mine$", "new_mine"),),
    }
    report = reknit.load(path, target, options=options(**rules))
    assert target["model"]["w"].tolist() == [[3] * 3] * 2
    assert target["model"]["b"].tolist() == [3, 3]
    assert target["model"]["epoch"] == 3
    assert target["new_average"].shadow["b"][0].tolist() == [3, 3]
    assert target["new_mine"].value == {"v": 3}
    assert target["new_rate"] == 3
    assert {"model/w", "model/b", "model/epoch", "new_rate", "new_mine"} <= set(report.restored)


def test_items_that_are_not_loaded_play_no_role_after_renaming_either(path: Path) -> None:
    target = {"model": state()["model"]}
    report = reknit.load(path, target, options=options(**RULES))
    assert report.unexpected == ()
    assert target["model"]["b"].tolist() == [3, 3]
    with pytest.raises(reknit.MismatchError, match=r"no item 'net'.*") as caught:
        reknit.load(path, {"net": state()["model"]}, options=options(**RULES))
    assert "'model'" in str(caught.value)


def test_a_problem_mentions_both_names(path: Path) -> None:
    target = {"model": state()["model"] | {"w": np.zeros((9, 9))}}
    with pytest.raises(reknit.MismatchError, match=r"model/w: .* \(its name in the checkpoint is net/a\)"):
        reknit.load(path, target, options=options(**RULES))


def test_a_damaged_block_mentions_both_names(path: Path) -> None:
    (file,) = path.glob("net/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(reknit.CorruptError, match=r"model/b \(there net/z\), model/w \(there net/a\)"):
        reknit.load(path, {"model": state()["model"]}, options=options(**RULES))


def test_rules_that_do_not_suit_the_checkpoint_are_refused_before_anything_changes(path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rename": {"net/z": "net/a"}}, "makes 'net/a' of two names"),
        ({"rewrite": (("net/.*", "net/x"),)}, "makes 'net/x' of two names"),
        ({"rename": {"nett/": "model/"}}, "rename has 'nett/', which matches no name"),
        ({"rewrite": (("^x", "y"),)}, r"rewrite has '\^x', which matches no name"),
        ({"rename": {"average/shadow/w": "other/w"}}, "takes 'other/w' out of 'average/~s'"),
    ]
    for rules, message in one_by_one(cases):
        target = state()
        with pytest.raises(reknit.MismatchError, match=message):
            reknit.load(path, target, strict=False, options=options(**rules))
        assert not target["model"]["w"].any()
        with pytest.raises(reknit.MismatchError, match=message):
            reknit.open(path, options=options(**rules))


def test_a_value_under_a_new_name_keeps_its_types_and_attributes(tmp_path: Path) -> None:
    versioned = OrderedDict(b=1, a=2)
    vars(versioned).update(_metadata=3)
    value = [versioned, Counter("aab"), deque([1], 2), defaultdict(list, a=[1]), Namespace(a={1})]
    reknit.save(tmp_path / "c", {"old": {"v": value}, "object": Accessors(lambda: value, print)})
    taken: list[Any] = []
    state: dict[str, Any] = {"new": {"v": []}, "other": Accessors(dict, taken.append)}
    reknit.load(tmp_path / "c", state, options=options(rename={"old/": "new/", "object/": "other/"}))
    for found in (state["new"]["v"], taken[0]):
        assert [(type(one), vars(one) if hasattr(one, "__dict__") else one) for one in found] == [
            (type(one), vars(one) if hasattr(one, "__dict__") else one) for one in value
        ]
        assert found == value


def test_a_checkpoint_that_is_looked_into_has_the_new_names(path: Path) -> None:
    with reknit.open(path, options=options(**RULES)) as checkpoint:
        assert "net" not in checkpoint.items
        assert list(checkpoint.tensors["model"]) == ["b", "w"]
        assert checkpoint.values["model"] == {"epoch": 3}
        assert checkpoint.read("model", "w", (0, 1)) == 3


def test_ranks_with_different_items_and_values_of_their_own_agree_on_the_names() -> None:
    ProcessMemory.clear("renamed")

    def save(group: Group) -> None:
        saved = {
            f"old.{group.rank}": {"w": np.full(4, group.rank), "v": group.rank},
            "own": reknit.PerRank([group.rank]),
            "lag": {"s": group.rank},
        }
        reknit.save("process://renamed", saved, group=group)

    def load(group: Group) -> dict[str, Any]:
        target: dict[str, Any] = {
            f"new_{group.rank}": {"w": np.full(4, 9), "v": 9},
            "private": reknit.PerRank([9]),
            "lag": {"seconds": 9},
        }
        rules = options(rename={"own": "private", "lag/s": "lag/seconds"}, rewrite=((r"old\.", "new_"),))
        assert reknit.load("process://renamed", target, group=group, options=rules).notes == {}
        return target

    run_ranks(3, save)
    for rank, target in enumerate(run_ranks(3, load)):
        assert target[f"new_{rank}"]["w"].tolist() == [rank] * 4
        assert target[f"new_{rank}"]["v"] == rank
        assert target["private"].value == [rank]
        assert target["lag"]["seconds"] == rank


def saved_by_ranks(folder: Path, damaged: Sequence[int]) -> None:
    """Save a model and values of each rank's own; damage the latter on some ranks."""

    def save(group: Group) -> None:
        reknit.save(folder, {"m": {"w": np.full(4, 3.0)}, "own": reknit.PerRank([group.rank])}, group=group)

    run_ranks(2, save)
    files = sorted(folder.glob("own/*"))
    assert len(files) == 2
    for rank in damaged:
        files[rank].write_bytes(bytes(files[rank].stat().st_size))


@pytest.mark.parametrize("damaged", [(0,), (0, 1)])
def test_damaged_values_of_ranks_in_an_item_that_nobody_wants_do_not_stop_a_load(
    tmp_path: Path, damaged: Sequence[int]
) -> None:
    saved_by_ranks(tmp_path / "x", damaged)

    def load(group: Group) -> None:
        target = {"m": {"v": np.zeros(4)}}
        rules = options(rename={"m/w": "m/v"}, rewrite=(("^own$", ""),) if len(damaged) == 2 else ())
        reknit.load(tmp_path / "x", target, group=group, options=rules)
        assert target["m"]["v"].tolist() == [3] * 4

    run_ranks(2, load)


@pytest.mark.parametrize("item", ["own", "private"])
def test_damaged_values_of_ranks_in_an_item_that_is_wanted_are_told(tmp_path: Path, item: str) -> None:
    saved_by_ranks(tmp_path / "x", (0, 1))
    rules = {"m/w": "m/v"} | ({"own": item} if item != "own" else {})

    def load(group: Group) -> None:
        target = {item: reknit.PerRank([9])}
        reknit.load(tmp_path / "x", target, strict=[f"!{item}*"], group=group, options=options(rename=rules))

    with pytest.raises(reknit.CorruptError, match=r"own/.* differ from the saved bytes"):
        run_ranks(2, load)


def test_ranks_whose_values_are_whole_load_them_where_the_first_ranks_are_damaged(tmp_path: Path) -> None:
    saved_by_ranks(tmp_path / "x", (0,))

    def load(group: Group) -> None:
        target = {"private": reknit.PerRank([9])} if group.rank else {"m": {"w": np.zeros(4)}}
        reknit.load(tmp_path / "x", target, group=group, options=options(rename={"own": "private"}))
        assert group.rank == 0 or target["private"].value == [1]  # type: ignore[union-attr]

    run_ranks(2, load)
