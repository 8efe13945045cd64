"""Files that agree with the manifest, or are read from another place."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from reknit.engine.stored.file_checks import check_sizes, read_blocks, read_checked
from reknit.errors import CorruptError, ReknitError, StorageError
from reknit.format.checksum import block_digests
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.manifest import FileEntry
from tests.storage.process_memory import ProcessMemory

BLOCK = 4096
DATA = bytes(range(256)) * 40
FILE = FileEntry("extra/x", len(DATA), tuple(block_digests(DATA, BLOCK)))
OTHER = DATA[:-1] + b"\0"


def place(name: str, data: bytes | None) -> ProcessMemory:
    ProcessMemory.clear(f"checked-{name}")
    storage = ProcessMemory(f"checked-{name}")
    if data is not None:
        storage.put(FILE.path, data, if_absent=False)
    return storage


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "missing"),
        (DATA[:-1], "10239 bytes"),
        (DATA + b"\0", "10241 bytes"),
        (OTHER, "bytes 8192:10240"),
    ],
)
def test_a_small_file_that_is_not_what_was_saved_comes_from_the_first_copy_that_has_it(
    found: bytes | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = place("here", found)
    with pytest.raises(CorruptError, match=says):
        read_checked(here, FILE, BLOCK)
    with caplog.at_level(logging.WARNING):
        copies = [place("short", DATA[:5]), place("good", DATA), place("never", None)]
        assert read_checked(here, FILE, BLOCK, copies) == DATA
    (reported,) = caplog.messages
    assert says in reported
    assert "process://checked-good" in reported


def test_blocks_from_any_one_on_are_compared_with_their_own_digests() -> None:
    data = np.arange(5000, dtype=np.int32).tobytes()
    file = FileEntry("extra/y", len(data), tuple(block_digests(data, BLOCK)))
    assert len(set(file.digests)) == len(file.digests) > 3
    storage = place("blocks", None)
    for start in range(0, len(data), BLOCK):
        read = memoryview(bytearray(len(data) - start))
        storage.put(file.path, data, if_absent=False)
        read_blocks(storage, file, start, read, BLOCK)
        assert read == data[start:]
        storage.put(file.path, data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :], if_absent=False)
        with pytest.raises(CorruptError, match=rf"bytes {start}:\d+ of extra/y"):
            read_blocks(storage, file, start, read, BLOCK)


def test_a_store_that_refuses_is_replaced_too() -> None:
    broken = FaultyStorage(place("broken", DATA), plan=[Fault("error", 1, "read_into")])
    assert read_checked(broken, FILE, BLOCK, [place("good", DATA)]) == DATA
    broken = FaultyStorage(place("broken", DATA), plan=[Fault("error", 1, "read_into")])
    with pytest.raises(StorageError):
        read_checked(broken, FILE, BLOCK)


def test_where_no_copy_is_whole_the_error_is_that_of_the_first_place() -> None:
    copies = [place("good", OTHER), place("never", None)]
    with pytest.raises(ReknitError, match="10239 bytes") as caught:
        read_checked(place("here", DATA[:-1]), FILE, BLOCK, copies)
    assert caught.value.path == "process://checked-here/extra/x"


def test_only_a_copy_of_the_same_size_replaces_a_file_that_is_missing() -> None:
    here, short, good = place("here", None), place("short", DATA[:5]), place("good", DATA)
    assert check_sizes(here, [FILE], [short, good]) == []
    (error,) = check_sizes(here, [FILE], [short])
    assert "extra/x is missing" in error
