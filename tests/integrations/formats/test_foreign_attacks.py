"""Files that other programs never write: each is refused at once, in little memory, and runs nothing."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import reknit
from reknit.errors import FormatError
from tests.running.cases import one_by_one_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def saved_tensor(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def dcp_folder(path: Path, changed: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint of DCP of one tensor, with changed facts in its metadata."""
    data = saved_tensor(torch.arange(12.0).reshape(3, 4))
    facts: dict[str, Any] = {
        "size": (3, 4),
        "dtype": torch.float32,
        "chunks": [((0, 0), (3, 4))],
        "places": [((0, 0), "__0_0.distcp", 0, len(data))],
        "transforms": None,
    }
    changed(facts)
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in facts["chunks"]]
    spec = TensorStorageMetadata(TensorProperties(facts["dtype"]), torch.Size(facts["size"]), chunks)
    places = {
        MetadataIndex("model.w", at): _StorageInfo(file, start, nbytes, facts["transforms"])
        for at, file, start, nbytes in facts["places"]
    }
    metadata = Metadata({"model.w": spec}, {"model.w": ("model", "w")}, places)
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "__0_0.distcp").write_bytes(data)


def place(*values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts.update(places=[values])


METADATA: dict[str, Callable[[dict[str, Any]], None]] = {
    "a place beyond the end": place((0, 0), "__0_0.distcp", 1 << 40, 100),
    "a place before the beginning": place((0, 0), "__0_0.distcp", -8, 100),
    "a place in the middle of an archive": place((0, 0), "__0_0.distcp", 8, 200),
    "a part of an archive": place((0, 0), "__0_0.distcp", 0, 700),
    "a file outside": place((0, 0), "../../../../../etc/hostname", 0, 8),
    "an absolute file": place((0, 0), "/etc/hostname", 0, 8),
    "a chunk that no place has": lambda facts: facts.update(places=[]),
    "a place of no chunk": place((1, 1), "__0_0.distcp", 0, 1000),
    "a box outside its shape": lambda facts: facts.update(size=(2, 4)),
    "a tensor with a hole": lambda facts: facts.update(size=(30, 4)),
    "a shape that overflows": lambda facts: facts.update(size=(1 << 40, 1 << 40)),
    "another dtype": lambda facts: facts.update(dtype=torch.int64),
    "another shape": lambda facts: facts.update(size=(3, 5), chunks=[((0, 0), (3, 5))]),
    "a transform": lambda facts: facts.update(transforms=["zstd"]),
}


def test_metadata_of_dcp_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    for name, folder in one_by_one_in(tmp_path, METADATA):
        dcp_folder(folder / "good", lambda _: None)
        assert reknit.verify(folder / "good").ok
        dcp_folder(folder / "bad", METADATA[name])
        with pytest.raises(reknit.ReknitError) as caught:
            reknit.open(folder / "bad")
        assert not isinstance(caught.value, reknit.CheckpointNotFoundError)
        target = {"w": torch.full((3, 4), 7.0)}
        with pytest.raises(reknit.ReknitError):
            reknit.load(folder / "bad", {"model": target})
        assert torch.equal(target["w"], torch.full((3, 4), 7.0))


def rezipped(path: Path, change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> None:
    """Write an archive of torch.save anew, member by member."""
    with zipfile.ZipFile(path) as archive:
        members = [(each, archive.read(each)) for each in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in members:
            change(archive, each, data)


def packed(archive: zipfile.ZipFile, each: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(each.filename, data, zipfile.ZIP_DEFLATED)


def twice(archive: zipfile.ZipFile, each: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(each.filename, data)
    if each.filename.endswith("data/0"):
        archive.writestr("other/data.pkl", data)


def lost(archive: zipfile.ZipFile, each: zipfile.ZipInfo, data: bytes) -> None:
    if not each.filename.endswith("data/0"):
        archive.writestr(each.filename, data)


def short(archive: zipfile.ZipFile, each: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(each.filename, data[:-4] if each.filename.endswith("data/0") else data)


def swapped(archive: zipfile.ZipFile, each: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(each.filename, b"big" if each.filename.endswith("byteorder") else data)


def test_an_archive_that_torch_does_not_write_is_refused(tmp_path: Path) -> None:
    for change, folder in one_by_one_in(tmp_path, [packed, twice, lost, short, swapped]):
        torch.save({"w": torch.arange(12.0)}, folder / "a.pt")
        rezipped(folder / "a.pt", change)
        with pytest.raises(FormatError):
            reknit.open(folder / "a.pt")


def test_an_array_that_unpacks_to_more_or_less_than_it_says_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(1 << 16))
    data = (tmp_path / "a.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        (member,) = archive.infolist()
    old, header = struct.pack("<I", member.file_size), struct.pack("<I", member.file_size + 8 * 512)
    changed = data.replace(old, header)
    (tmp_path / "b.npz").write_bytes(changed)
    with pytest.raises(FormatError):
        reknit.open(tmp_path / "b.npz")


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", v=np.zeros(64), w=np.ones(64))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<I", 8)  # both begin at the same place, nearly
    (tmp_path / "b.npz").write_bytes(data)
    with pytest.raises(FormatError):
        reknit.open(tmp_path / "b.npz")


def test_an_index_of_hugging_face_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    cases: list[bytes] = [
        b'{"weight_map": {"w": "../../etc/hostname.safetensors"}}',
        b'{"weight_map": {"w": "absent.safetensors"}}',
        b'{"weight_map": {"lost": "model-0.safetensors"}}',
        b'{"weight_map": [1, 2]}',
        b'{"weight_map": {"w": 3}}',
        b'{"weight_map": {"w": ' + b"[" * 10_000,
    ]
    for index, folder in one_by_one_in(tmp_path, cases):
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        (folder / "model-0.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        (folder / "model.safetensors.index.json").write_bytes(index)
        with pytest.raises(reknit.ReknitError):
            reknit.open(folder)


HOSTILE = """
import resource, sys, time
import reknit
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        reknit.open(path)
    except reknit.ReknitError:
        continue
    raise AssertionError(path)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_bombs_are_refused_in_little_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zeros.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * (1 << 28))
    with zipfile.ZipFile(tmp_path / "memo.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02Nr\xff\xff\xff\x7f0h\x00.")
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"](" + b"h" + bytes([n]) + (b"h" + bytes([n])) * 9 + b"eq" + bytes([n + 1]) for n in range(30)
    )
    with zipfile.ZipFile(tmp_path / "laughs.pt", "w") as archive:
        archive.writestr("a/data.pkl", laughs + b".")
    (tmp_path / "header.safetensors").write_bytes(
        struct.pack("<Q", 90_000_000) + b'{"w":{"dtype":' + b" " * 500
    )
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000) + b'{"w":{"dtype":"F32","shape":[')
        file.truncate(1 << 34)
    with (tmp_path / "sparse.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1 << 50, 1 << 50))
        file.truncate(1 << 34)
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"(" * 3000
    (tmp_path / "deep.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
    paths = sorted(map(str, tmp_path.iterdir()))
    ran = subprocess.run([sys.executable, "-c", HOSTILE, *paths], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 256
