"""Entries of other programs that reknit cannot read: each is named, and all others open."""

from __future__ import annotations

import enum
import functools
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reknit
from reknit.cli.main import main
from reknit.errors import FormatError, MismatchError
from tests.ranks import run
from tests.running.cases import one_by_one_in

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

NAME = r"a pickle needs tests\.engine\.test_unread_entries\.Settings, which reknit neither imports nor runs"


class Settings:
    """An object of a program that reknit does not import."""

    def __init__(self) -> None:
        self.depth = 3

    class Inner:
        """A class of a class."""

    class Mode(enum.Enum):
        """Members of a class."""

        FAST = 1


class Typed:
    """An object with a type in its state."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights().items()}


def saved(folder: Path, kind: str, **more: Any) -> str:
    """Save the weights and more as DCP or torch.save do, and return the path."""
    path = str(folder / kind)
    state = {"model": weights(), **more}
    if kind == "DCP":
        dcp.save(state, checkpoint_id=path)
    else:
        torch.save(state, path)
    return path


KINDS = pytest.mark.parametrize("kind", ["torch.save", "DCP"])


@pytest.mark.parametrize(("kind", "num"), [("torch.save", 0), ("torch.save", 5), ("DCP", 1)])
def test_all_others_open_and_each_is_named_once(
    kind: str, num: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, kind, own={f"a{n}": Settings() for n in range(num)} | {"depth": 3})
    with caplog.at_level(logging.WARNING, "reknit"), reknit.open(path) as checkpoint:
        assert checkpoint.read("model", "w").tolist() == weights()["w"].tolist()
        assert dict(checkpoint.values["own"]) == {"depth": 3}
        other = checkpoint.manifest.other
        assert other is not None
        assert [entry.name for entry in other.unread] == [f"own/a{n}" for n in range(num)]
        for entry in other.unread:
            with pytest.raises(FormatError, match=rf"'{entry.name}' cannot be read: {NAME}"):
                checkpoint.read(entry.item, entry.fqn)
    said = [record.getMessage() for record in caplog.records if record.name == "reknit"]
    assert len(said) == (num > 0)
    assert all(f"reknit cannot read {num} entr" in line and "own/a0" in line for line in said)


@KINDS
def test_a_load_without_them_is_whole_and_one_that_needs_them_changes_nothing(
    kind: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, kind, own={"a": Settings(), "depth": 3})
    target = zeros()
    reknit.load(path, {"model": target})
    assert torch.equal(target["w"], weights()["w"])
    cases: list[tuple[str, dict[str, Any]]] = [("", {"a": 1}), ("", {}), ("/depth", {"a": {"depth": 1}})]
    for place, wanted in cases:
        target = zeros()
        with pytest.raises(MismatchError, match=rf"own/a{place}: saved, but .* read: {NAME}"):
            reknit.load(path, {"model": target, "own": {"depth": 0, **wanted}})
        assert not target["w"].any()
    only = reknit.LoadOptions(only=("model/*", "own/depth"))
    options: dict[str, Any]
    for options in ({"strict": False}, {"strict": ["!own/a"]}, {"options": only}):
        target, own = zeros(), {"depth": 0}
        reknit.load(path, {"model": target, "own": own}, **options)
        assert torch.equal(target["w"], weights()["w"])
        assert own == {"depth": 3}


def _load(path: str) -> str:
    target = zeros()
    reknit.load(path, {"model": target})
    assert torch.equal(target["w"], weights()["w"])
    try:
        reknit.load(path, {"model": target, "own": {"a": 1}})
    except MismatchError as error:
        return error.message
    return ""


def test_every_rank_is_told_the_reason(tmp_path: Path) -> None:
    path = saved(tmp_path, "DCP", own={"a": Settings()})
    for message in run(2, _load, path):
        assert "own/a: saved, but it cannot be read" in message


def test_a_value_of_another_kind_leaves_the_others_readable(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "a list": [torch.ones(2), Settings()],
        "a class in a key": {(1, 2, 3, Settings): 1},
        "a class as a key": {Settings: 1, (1, 2): 3},
        "a type of typing in an object": Typed(Any),  # as OmegaConf has it
        "a generic type": Typed(dict[str, int]),
        "a nested class": Settings.Inner(),
        "an enumeration in a class": Settings.Mode.FAST,
        "a class of Python": tuple,
        "a function with arguments": functools.partial(sorted, reverse=True),
        "a pattern": re.compile("a+"),
        "a range": range(3),
    }
    for name, folder in one_by_one_in(tmp_path, odd):
        path = saved(folder, "torch.save", odd=odd[name], numbers={1, 2})
        with reknit.open(path) as checkpoint:
            assert checkpoint.values["numbers"][""] == {1, 2}
            assert checkpoint.read("model", "b").tolist() == [1, 1]
            other = checkpoint.manifest.other
            assert other is not None
            assert {entry.item for entry in other.unread} == {"odd"}
            assert not any("Unreadable" in entry.name + entry.why for entry in other.unread)


def test_a_name_with_codes_of_a_terminal_is_escaped_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, "torch.save", **{"own\x1b[31m\n": Settings()})
    with caplog.at_level(logging.WARNING, "reknit"), reknit.open(path) as checkpoint:
        assert checkpoint.manifest.other is not None
        for text in (caplog.text.rstrip(), checkpoint.manifest.other.unchecked):
            assert r"own\x1b[31m\n" in text
            assert "\x1b" not in text


def test_a_file_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    torch.save(Settings(), tmp_path / "one.pt")
    with pytest.raises(FormatError, match=f"cannot be opened: {NAME}"):
        reknit.open(tmp_path / "one.pt")


def test_commands_say_what_stays_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, "torch.save", own=Settings())
    assert main(["show", path]) == 0
    assert "cannot be read: own (a pickle needs" in capsys.readouterr().out
    for more in ([], ["--data"]):
        assert main(["verify", path, *more]) == 0
        assert "reknit cannot read 1 entry: own" in capsys.readouterr().out
    assert main(["import", path, str(tmp_path / "new")]) == 0
    assert "reknit cannot read 1 entry: own" in capsys.readouterr().out
    target = zeros()
    reknit.load(tmp_path / "new", {"model": target})
    assert torch.equal(target["w"], weights()["w"])
    with reknit.open(tmp_path / "new") as checkpoint:
        assert checkpoint.items == ("model",)
