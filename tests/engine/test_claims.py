"""Values on their way into files of blobs: encoded once, or before, and written several at a time."""

from __future__ import annotations

import threading
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.comm.group import SoloGroup
from reknit.engine.memory.write import Written
from reknit.engine.saving.coordinator import write_blobs
from reknit.engine.saving.part import EncodedFile, blob_files, encode_holdings
from reknit.errors import StorageError
from reknit.format import paths
from reknit.format.blob_codec import decode_blobs, encode_value
from reknit.options import SaveOptions
from reknit.planner.columns import packed
from reknit.planner.save import OWN
from reknit.types.shard import Blob, Encoded, Holdings
from tests.engine.held import task_at
from tests.running.cases import one_by_one
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from reknit.engine.saving.task import SaveTask

WRITE_ID = "0123456789abcdef" * 2
VALUE = {"tokens": np.arange(1000), "position": 7}


def encoded(value: Any, room: int) -> Encoded:
    data = encode_value(value)
    return Encoded(memoryview(bytearray(room) + bytearray(data)), room)


def test_a_value_that_is_encoded_already_makes_the_same_file() -> None:
    for fqn, room in one_by_one(product(["", "a/~p", "n" * 4096], [0, 3, 4112])):
        value = encoded(VALUE, room)
        blobs = [Blob("loader", fqn, one, {"source": 1}) for one in (VALUE, value)]
        plain, ready = encode_holdings(Holdings(("loader",), (), tuple(blobs)), SaveOptions()).blobs
        assert bytes(ready.data) == plain.data
        assert (decode_blobs(bytes(ready.data))[fqn]["tokens"] == VALUE["tokens"]).all()
        in_place = np.shares_memory(
            np.frombuffer(ready.data, np.uint8), np.frombuffer(value.memory, np.uint8)
        )
        assert in_place == (room == 4112 or (room == 3 and fqn == ""))


def test_a_value_with_several_names_is_stored_under_each_as_if_it_had_no_other() -> None:
    for value in one_by_one([VALUE, encoded(VALUE, 100)]):
        names = ["a", "b" * 300, "c/d"]
        together = tuple(Blob("optimizer", name, value) for name in names)
        held = encode_holdings(Holdings(("optimizer",), (), together), SaveOptions())
        for name, blob in zip(names, held.blobs, strict=True):
            alone = encode_holdings(
                Holdings(("optimizer",), (), (Blob("optimizer", name, VALUE),)), SaveOptions()
            )
            assert (bytes(blob.data), blob.key) == (alone.blobs[0].data, alone.blobs[0].key)


def test_a_file_with_one_value_is_what_was_encoded_and_no_copy_of_it() -> None:
    holdings = Holdings(("loader",), (), (Blob("loader", "x", encoded(VALUE, 100), {"source": 1}),))
    held = encode_holdings(holdings, SaveOptions())
    (file,) = blob_files(held.blobs, packed([], "i8"), 0)
    assert file.data is held.blobs[0].data


def test_a_value_is_written_by_its_owner_and_by_each_rank_where_they_disagree() -> None:
    values = (Blob("m", "a", 1), Blob("m", "b", 2), Blob("n", "c", 3), Blob("n", "d", 4, {"dp": 1}))
    blobs = encode_holdings(Holdings(("m", "n"), (), values), SaveOptions()).blobs
    files = blob_files(blobs, packed([1, OWN, 0], "i8"), 1)
    assert [(file.item, file.coordinate, decode_blobs(file.data)) for file in files] == [
        ("m", None, {"a": 1}),
        ("m", {"rank": 1}, {"b": 2}),
        ("n", {"dp": 1}, {"d": 4}),
    ]


def task_of(storage: ProcessMemory, threads: int | None = None) -> SaveTask:
    return task_at(storage, SoloGroup(), SaveOptions(threads=threads))


def many(count: int) -> list[EncodedFile]:
    return [EncodedFile("loader", {"source": n}, b"\x80" + bytes([n])) for n in range(count)]


class Meeting(ProcessMemory):
    """A store in which no file is finished until `count` files are about to be."""

    def __init__(self, name: str, count: int) -> None:
        ProcessMemory.clear(name)
        super().__init__(name)
        self.barrier = threading.Barrier(count, timeout=20)

    def create(self, path: str, nbytes: int) -> Any:
        self.barrier.wait()
        return super().create(path, nbytes)


def test_small_files_are_written_several_at_a_time_and_told_in_their_order() -> None:
    storage, written = Meeting("meeting", 16), list[Written]()
    places = write_blobs(task_of(storage), many(32), WRITE_ID, written)
    assert [place["source"] for place in places] == list(range(32))
    assert [file.path for file in written] == [
        paths.blob_path("loader", 0, WRITE_ID, own=n) for n in range(32)
    ]
    assert {file.path for file in storage.list()} == {file.path for file in written}


class Refusing(ProcessMemory):
    """A store that refuses one file."""

    def create(self, path: str, nbytes: int) -> Any:
        if ".own.7." in path:
            raise StorageError("no")
        return super().create(path, nbytes)


def test_after_an_error_all_that_is_there_is_known() -> None:
    ProcessMemory.clear("refusing")
    storage, written = Refusing("refusing"), list[Written]()
    with pytest.raises(StorageError, match=r"own\.7"):
        write_blobs(task_of(storage), many(20), WRITE_ID, written)
    assert {file.path for file in storage.list()} == {file.path for file in written}
