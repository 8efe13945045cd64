"""Ranks that load a checkpoint of another program together: the root opens it, and all share the reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reknit
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

ARRAYS: dict[str, Any] = {
    "w": np.arange(300_000, dtype=np.float32).reshape(300, 1000),
    "odd": np.arange(7, dtype=np.uint8),
    "f": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
}


def saved(folder: Path) -> list[Path]:
    """Save the arrays in formats with plain ranges, and with files that each rank's store makes."""
    save_file({name: np.ascontiguousarray(one) for name, one in ARRAYS.items()}, folder / "a.safetensors")
    np.savez_compressed(folder / "a.npz", **ARRAYS)
    return [folder / "a.safetensors", folder / "a.npz"]


@pytest.mark.parametrize("options", [{"share": "always"}, {"share": "never"}, {"verify": "full"}])
def test_each_rank_receives_every_byte(options: dict[str, Any], tmp_path: Path) -> None:
    for path in saved(tmp_path):

        def load(group: Group, path: Path = path) -> str | None:
            target = {name: np.zeros_like(one) for name, one in ARRAYS.items()}
            report = reknit.load(
                path, {"model": target}, group=group, options=reknit.LoadOptions(threads=2, **options)
            )
            assert all(np.array_equal(target[name], one) for name, one in ARRAYS.items())
            return report.unchecked

        assert all(said and "no digests" in said for said in run_ranks(3, load))


def test_a_name_that_is_missing_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    path = saved(tmp_path)[0]
    target = {"w": np.zeros_like(ARRAYS["w"])}

    def load(group: Group) -> None:
        more = {"lost": np.zeros(3)} if group.rank == 1 else {}
        with pytest.raises(reknit.MismatchError, match="model/lost"):
            reknit.load(path, {"model": {**target, **more}}, group=group, strict=["!model/odd", "!model/f"])

    run_ranks(3, load)
    assert not target["w"].any()
