"""examples/reader: a second program reads checkpoints as reknit does, and refuses the same damage."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pyarrow
import pytest
import torch

import reknit
from reknit.errors import FormatError
from reknit.types.box import Box
from tests.forged import resealed, rewritten, with_value
from tests.integrations.formats.checkpoints import columns, every_dtype, save_in_boxes

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parents[2] / "examples" / "reader"
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def program() -> Path:
    """Build the program once for each version of its sources and of Arrow, for all runs of the tests."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler here")
    sources = hashlib.sha256(pyarrow.__file__.encode() + pyarrow.__version__.encode())
    for source in sorted(HERE.iterdir()):
        sources.update(source.read_bytes() if source.is_file() else b"")
    built = Path(tempfile.gettempdir(), f"reknit-reader-{os.getuid()}-{sources.hexdigest()[:16]}")
    if not built.exists():
        fresh = built.with_name(f"{built.name}.{os.getpid()}")
        commands = runpy.run_path(str(HERE / "build.py"))
        subprocess.run(commands["command"](fresh), check=True)
        fresh.replace(built)
    return built


def ran(program: Path, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, check=False)


def output(program: Path, *arguments: object) -> bytes:
    done = ran(program, *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def require_agreement(program: Path, path: Path, *, most: int = 100) -> None:
    """Compare names, specs and bytes with the results of reknit."""
    listed = [json.loads(line) for line in output(program, "list", path).splitlines()]
    with reknit.open(path) as checkpoint:
        specs = {
            (item, fqn): spec for item in checkpoint.items for fqn, spec in checkpoint.tensors[item].items()
        }
        found = {(one["item"], one["fqn"]): (one["dtype"], tuple(one["shape"])) for one in listed}
        assert found == {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
        for item, fqn in list(specs)[:most]:
            data = output(program, "slice", path, item, fqn, "--bytes")
            assert data == checkpoint.read(item, fqn).tobytes(), fqn
        assert output(program, "check", path).startswith(f"sound: {len(specs)} tensors, ".encode())


def numbers(text: bytes) -> list[complex]:
    """Return printed numbers; a pair is a complex number."""
    found = []
    for word in text.decode().split():
        real, _, imaginary = word.partition(",")
        plain = {"True": "1", "False": "0"}.get(real, real)
        found.append(complex(float(plain), float(imaginary or 0)))
    return found


def test_every_type_is_read_and_printed(program: Path, tmp_path: Path) -> None:
    state = every_dtype()
    reknit.save(tmp_path / "c", {"model": state, "extra": {"text": "x", "number": 3}})
    require_agreement(program, tmp_path / "c", most=12)
    for dtype, tensors in state.items():
        printed = output(program, "slice", tmp_path / "c", "model", f"{dtype}/matrix", "1:3,:4")
        assert [len(line.split()) for line in printed.splitlines()] == [4, 4]
        if dtype == "float4_e2m1fn_x2":
            halves = tensors["matrix"].view(torch.uint8)[1:3, :4].flatten().numpy()
            pairs = np.stack([halves & 15, halves >> 4], 1).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
            wanted = [complex(*pair) for pair in pairs.astype(float)]
        else:
            wide = torch.complex128 if dtype.startswith("complex") else torch.float64
            wanted = [complex(number) for number in tensors["matrix"][1:3, :4].to(wide).flatten().tolist()]
        np.testing.assert_allclose(numbers(printed), wanted, rtol=1e-8)


def uneven(shape: tuple[int, int]) -> list[Box]:
    """Cut a matrix into boxes of a grid without common lines."""
    rows, width = shape
    return [
        Box((0, 0), (1, width)),
        Box((1, 0), (rows - 1, 3)),
        Box((1, 3), (2, width - 3)),
        Box((3, 3), (rows - 3, width - 3)),
    ]


def test_tensors_in_many_chunks_and_under_hard_names_are_read(program: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "wide": random.standard_normal((50, 301)),
        "half": random.standard_normal((33, 64)).astype(ml_dtypes.bfloat16),
        "eight": random.standard_normal((16, 8)).astype(ml_dtypes.float8_e4m3fn),
        "uneven": random.standard_normal((7, 9)).astype(np.complex128),
        "[a]%\n\x85é": np.arange(6).reshape(2, 3),
        "__metadata__": np.ones(2, np.float32),
        "": np.float32(2.5).reshape(()),
    }
    boxes = {
        "wide": columns((50, 301), 7),
        "half": columns((33, 64), 4),
        "eight": columns((16, 8), 8),
        "uneven": uneven((7, 9)),
        "[a]%\n\x85é": columns((2, 3), 3),
    }
    save_in_boxes(tmp_path / "c", arrays, boxes, item="mo/del é")
    require_agreement(program, tmp_path / "c")
    wanted = arrays["wide"][3:7, 40:200]
    printed = output(program, "slice", tmp_path / "c", "mo/del é", "wide", "3:7,40:200")
    assert np.array_equal(np.array(numbers(printed)).real.reshape(4, 160), wanted)


def test_a_checkpoint_of_many_files_and_ties_is_read(program: Path, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    net[1].weight = net[0].weight
    state = {f"item{n:03}": {"w": torch.full((3,), n), "v": n} for n in range(70)}
    reknit.save(tmp_path / "c", {"net": net, "rng": reknit.RngState(), **state}, step=3)
    assert json.loads((tmp_path / "c" / "manifest.json").read_text())["requires"] == ["file_table"]
    require_agreement(program, tmp_path / "c", most=8)


def test_an_empty_checkpoint_and_a_moved_one_are_read(program: Path, tmp_path: Path) -> None:
    reknit.save(tmp_path / "empty", {"extra": {"n": 1}})
    require_agreement(program, tmp_path / "empty")
    reknit.save(tmp_path / "c", {"model": {"w": torch.arange(5)}})
    reknit.cool(tmp_path / "c", tmp_path / "cold")
    require_agreement(program, tmp_path / "c")


def test_checkpoints_of_earlier_versions_are_read(program: Path) -> None:
    for name in ("format_1", "format_1_file_table"):
        require_agreement(program, GOLDEN / name, most=5)


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    reknit.save(tmp_path / "c", {"model": {"w": torch.arange(2000.0)}, "extra": {"n": 1}})
    return tmp_path / "c"


def test_one_flipped_bit_anywhere_is_an_error(program: Path, damaged: Path) -> None:
    for file in ("manifest.json", "index.*", "model/*", "extra/*"):
        (path,) = damaged.glob(file)
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            flipped(path, place)
            done = ran(program, "check", damaged)
            assert done.returncode == 1, place
            assert done.stdout == b"", file
            assert done.stderr.startswith(b"reader: "), file
            path.write_bytes(whole)
        assert ran(program, "check", damaged).returncode == 0, file


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1])


def linked(path: Path) -> None:
    other = path.rename(path.parents[1] / "other")
    path.symlink_to(other)


def test_a_missing_short_or_linked_file_is_an_error(program: Path, damaged: Path) -> None:
    harms: tuple[Callable[[Path], object], ...] = (cut_short, linked, Path.unlink)
    for file, harm in itertools.product(("index.*", "model/*"), harms):
        (path,) = damaged.glob(file)
        whole = path.read_bytes()
        harm(path)
        assert ran(program, "check", damaged).returncode == 1, (file, harm)
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    assert ran(program, "check", damaged).returncode == 0


def test_damage_in_a_block_is_an_error_of_a_part_that_touches_it_only(program: Path, tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"w": torch.zeros(3 << 20)}})  # three blocks
    (path,) = (tmp_path / "c").glob("model/*")
    flipped(path, path.stat().st_size - 1)
    assert ran(program, "slice", tmp_path / "c", "model", "w", "0:10").returncode == 0
    assert ran(program, "slice", tmp_path / "c", "model", "w", f"{(3 << 20) - 1}:").returncode == 1


def test_wrong_usage_is_told(program: Path, damaged: Path) -> None:
    cases: list[tuple[tuple[str, ...], str]] = [
        ((), "no command"),
        (("show", "here"), "no such command: show"),
        (("slice", "here", "model", "x"), "no such tensor: model/x"),
        (("slice", "here", "model", "w", "a:b"), "not a range: a:b"),
        (("slice", "here", "model", "w", ":,:"), "more ranges than dimensions"),
    ]
    for arguments, said in cases:
        done = ran(program, *(str(damaged) if one == "here" else one for one in arguments))
        assert done.returncode == 2, arguments
        assert re.search(said, done.stderr.decode())


def test_a_sealed_index_that_breaks_a_rule_is_refused_by_both(
    program: Path, damaged: Path, tmp_path: Path
) -> None:
    rewritten(damaged, lambda table: table)
    assert ran(program, "check", damaged).returncode == 0
    cases: list[tuple[str, Any]] = [
        ("fqn", "w" * 80_000_000),
        ("dtype", "float31"),
        ("shape", [2001]),
        ("shape", [2000, 1]),
        ("offsets", [1]),
        ("lengths", [1999]),
        ("file", "model/other"),
        ("start", 4098),
        ("nbytes", 4),
    ]
    for number, (name, value) in enumerate(cases):
        wrong = shutil.copytree(damaged, tmp_path / f"{number}")
        rewritten(wrong, partial(with_value, name=name, value=value), use_dictionary=False)
        assert ran(program, "check", wrong).returncode == 1, name
        with pytest.raises(FormatError):
            reknit.open(wrong).read("model", "w")


def test_a_sealed_manifest_that_breaks_a_rule_is_refused_by_both(
    program: Path, damaged: Path, tmp_path: Path
) -> None:
    resealed(damaged / "manifest.json", lambda document: None)
    assert ran(program, "check", damaged).returncode == 0
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda document: document.update(requires=["later"]),
        lambda document: document.update(format_version=2),
        lambda document: document["files"][0].update(path="../x"),
        lambda document: document["files"].append(document["files"][0]),
        lambda document: document.update(block_nbytes=5000),
        lambda document: document["items"].append(document["items"][0]),
        lambda document: document["blobs"][0].update(item="other"),
    ]
    for number, change in enumerate(changes):
        wrong = shutil.copytree(damaged, tmp_path / f"{number}")
        resealed(wrong / "manifest.json", change)
        assert ran(program, "check", wrong).returncode == 1, number
        with pytest.raises(FormatError):
            reknit.open(wrong)
