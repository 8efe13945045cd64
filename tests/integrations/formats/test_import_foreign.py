"""`reknit import`: the same bytes, committed once, by one process or several, also after a kill."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reknit
from reknit.api.ranks import acting
from reknit.cli.main import main
from reknit.engine.stored import foreign
from reknit.engine.stored.foreign import plan_copy
from reknit.errors import FormatError
from reknit.integrations.formats.import_ import import_checkpoint
from reknit.integrations.formats.open import read_foreign
from reknit.options import CommOptions
from reknit.storage.registry import following, open_storage
from tests import ranks

if TYPE_CHECKING:
    from pathlib import Path


def saved(folder: Path, num: int = 3, numel: int = 2000) -> dict[str, Any]:
    """Save a model of Hugging Face in two files, and return its arrays."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {f"layers.{n}.w": rng.random((numel, 3), np.float32) for n in range(num)}
    arrays |= {
        "scale": np.array(2.0),
        "codes": np.arange(7, dtype=np.uint8),
        "none": np.empty((0, 3), np.int16),
    }
    names = list(arrays)
    where: dict[str, str] = {}
    for number, part in enumerate((names[:2], names[2:])):
        file = f"model-{number}.safetensors"
        save_file({name: arrays[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return arrays


def check(path: Path, arrays: dict[str, Any]) -> None:
    """Check that a checkpoint of reknit is sound and has these arrays."""
    assert reknit.verify(path, "data").ok
    target = {name: np.zeros_like(array) for name, array in arrays.items()}
    report = reknit.load(path, {"model": target})
    assert report.unchecked is None
    assert all(np.array_equal(target[name], array) for name, array in arrays.items())


def test_an_import_has_every_byte_and_is_committed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = saved(tmp_path / "hf")
    report = import_checkpoint(tmp_path / "hf", tmp_path / "own", step=7)
    assert (report.step, report.num_tensors, report.num_kept, report.format) == (7, 6, 0, "Hugging Face")
    check(tmp_path / "own", arrays)
    assert reknit.latest(tmp_path) == str(tmp_path / "own")
    for arguments in ((tmp_path / "hf", tmp_path / "own"), (tmp_path / "own", tmp_path / "twice")):
        assert main(["import", *map(str, arguments)]) == 2
    assert main(["import", str(tmp_path / "absent"), str(tmp_path / "other")]) == 3
    capsys.readouterr()
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "own"), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_files"] == 1
    check(tmp_path / "own", arrays)


def test_files_of_an_earlier_try_are_kept_if_they_equal_their_source(tmp_path: Path) -> None:
    arrays = saved(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "own")
    (tmp_path / "own" / "manifest.json").unlink()
    assert import_checkpoint(tmp_path / "hf", tmp_path / "own").num_kept == 1
    (tmp_path / "own" / "manifest.json").unlink()
    (data,) = (tmp_path / "own").rglob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert import_checkpoint(tmp_path / "hf", tmp_path / "own").num_kept == 0
    check(tmp_path / "own", arrays)


IMPORT = """
import functools, os, signal, sys
from reknit.cli.main import main
from reknit.engine.stored import foreign
foreign.plan_copy = functools.partial(foreign.plan_copy, most_nbytes=1 << 20)
sync, left = os.fsync, [12]

def last(fd):
    sync(fd)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

os.fsync = last
sys.exit(main(["import", *sys.argv[1:]]))
"""


def test_a_killed_import_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = saved(tmp_path / "hf", num=20, numel=200_000)
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "hf"), str(tmp_path / "own"), "--workers", "1"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert any((tmp_path / "own").rglob("*.safetensors"))
    assert not (tmp_path / "own" / "manifest.json").exists()
    small = functools.partial(plan_copy, most_nbytes=1 << 20)
    monkeypatch.setattr(foreign, "plan_copy", small)
    report = import_checkpoint(tmp_path / "hf", tmp_path / "own")
    assert 0 < report.num_kept < report.num_files
    check(tmp_path / "own", arrays)


def each_rank(source: str, target: str) -> tuple[int, int]:
    report = import_checkpoint(source, target, group=acting(None, CommOptions()).group)
    return report.num_files, report.num_tensors


def test_ranks_import_together(tmp_path: Path) -> None:
    arrays = saved(tmp_path / "hf")
    done = ranks.run(2, each_rank, str(tmp_path / "hf"), str(tmp_path / "own"))
    assert sorted(done) == [(0, 6), (1, 6)]
    check(tmp_path / "own", arrays)


def test_ranks_divide_the_files_by_their_bytes(tmp_path: Path) -> None:
    saved(tmp_path / "hf", num=8)
    found = read_foreign(following(open_storage(tmp_path / "hf")))
    assert found is not None
    plan = plan_copy(found.index, found.manifest.write_id, 30_000)
    assert len(plan.files) > 4
    shares = [plan.share(rank, 3) for rank in range(3)]
    assert sorted(number for share in shares for number in share) == list(range(len(plan.files)))
    loads = [sum(plan.files[number].nbytes for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(file.nbytes for file in plan.files)


def test_what_cannot_be_read_is_not_imported(tmp_path: Path) -> None:
    saved(tmp_path / "hf")
    (tmp_path / "hf" / "model-1.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(FormatError):
        import_checkpoint(tmp_path / "hf", tmp_path / "own")
    assert not (tmp_path / "own").exists() or not any((tmp_path / "own").iterdir())
