"""An item without a tensor or a value is an item like others, also as the only one."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

import reknit
from reknit.cli.main import main
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register

if TYPE_CHECKING:
    from pathlib import Path

Empty = namedtuple("Empty", [])
EMPTY = {"a module": nn.ReLU(), "named tuples": (Empty(), Empty())}

register("unshared", lambda url, _: LocalStorage(url.removeprefix("unshared://")))


@pytest.mark.parametrize(("kind", "wait"), [("a module", True), ("named tuples", False)])
def test_a_checkpoint_of_nothing_but_an_empty_item_is_whole(
    kind: str, wait: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state: dict[str, Any] = {"only": EMPTY[kind]}
    path = tmp_path / "x"
    reknit.save(f"unshared://{path}", state, step=3, wait=wait).result()
    assert reknit.close()
    loaded = reknit.load(path, state)
    assert (loaded.step, loaded.restored) == (3, ())
    assert reknit.open(path).items == ("only",)
    assert reknit.verify(path, "data").ok
    for command in (["ls", tmp_path], ["show", path], ["verify", "--data", path], ["diff", path, path]):
        assert main([str(argument) for argument in command]) == 0
    assert "only" in capsys.readouterr().out
    assert main(["export", "hf", str(path), str(tmp_path / "hf")]) == 2
    assert "it holds no tensors at all" in capsys.readouterr().err
