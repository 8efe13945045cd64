"""The code writes the worked example of docs/format.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from reknit.format.blob_codec import decode_blobs, encode_blobs
from reknit.format.blob_types import BUILDERS, PICKLE
from reknit.format.checksum import block_digests
from reknit.format.data_file import NATIVE, HeaderEntry, encode_header, file_metadata
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.types.dtype import ITEMSIZE
from tests.format.samples import WRITE_ID

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXAMPLE = PAGE[PAGE.index("## An example") :]


def test_the_data_file_is_as_documented() -> None:
    header = encode_header([HeaderEntry("w", "float32", (2,), 0, 8)], file_metadata(WRITE_ID, 0, "model"))
    data = header + np.array([1, -2], "<f4").tobytes()
    (text,) = re.findall(r'\{"__metadata__".*', EXAMPLE)
    assert data[:8].hex(" ") in EXAMPLE
    assert data[8:4096].rstrip().decode() == text
    assert data[4096:].hex(" ") in EXAMPLE
    assert f"{len(data):,} bytes" in EXAMPLE
    assert f"{block_digests(data)[0]:016x}" in EXAMPLE


def test_the_blob_file_is_as_documented() -> None:
    block = EXAMPLE[EXAMPLE.index("82      ") : EXAMPLE.index("`index.01234567")]
    data = bytes.fromhex("".join(re.findall(r"^\s*((?:[0-9a-f]{2} )+)", block, re.MULTILINE)))
    value = {"epoch": 3, "betas": (0.9, 0.5)}
    assert encode_blobs(value) == data
    assert decode_blobs(data) == value
    assert f"{block_digests(data)[0]:016x}" in EXAMPLE


def test_the_manifest_is_as_documented() -> None:
    (text,) = re.findall(r'^\{"format".*', EXAMPLE, re.MULTILINE)
    manifest = decode_manifest(text.encode())
    assert encode_manifest(manifest) == text.encode()
    assert f"{len(text)} bytes" in EXAMPLE
    assert f"first {len(text) - 29}." in EXAMPLE


def test_every_extension_and_every_element_type_is_documented() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \| \S.* \| ", PAGE, re.MULTILINE)}
    assert codes == {*BUILDERS, PICKLE}
    for name, nbytes in ITEMSIZE.items():
        assert f"| `{name}` | {nbytes} |" in PAGE
    for name, native in NATIVE.items():
        assert f"`{name}` `{native}`" in PAGE
