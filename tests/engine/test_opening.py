from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

import reknit
from reknit.format.checksum import block_digests
from reknit.format.index import decode_index, encode_index
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.types.manifest import FileEntry

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shift", [1 << 20, -128])
def test_an_index_whose_extents_lie_is_refused_even_when_every_digest_is_right(
    tmp_path: Path, shift: int
) -> None:
    path = tmp_path / "step_1"
    weights = {name: np.ones((64, 8), np.float32) for name in ("a", "b")}
    reknit.save(path, {"model": weights})
    manifest = decode_manifest((path / "manifest.json").read_bytes())
    index = decode_index((path / manifest.index_path).read_bytes())
    start = index.start.copy()
    start[1] += shift
    data = encode_index(replace(index, start=start))
    (path / manifest.index_path).write_bytes(data)
    entry = FileEntry(manifest.index_path, len(data), tuple(block_digests(data)))
    files = tuple(entry if file.path == entry.path else file for file in manifest.files)
    (path / "manifest.json").write_bytes(encode_manifest(replace(manifest, files=files)))
    with pytest.raises(reknit.CorruptError, match="its file"):
        reknit.open(path)
    with pytest.raises(reknit.CorruptError, match="its file"):
        reknit.load(path, {"model": weights})
    assert not reknit.verify(path).ok
