"""Each class of error of a NameNode or a gateway becomes an error of reknit with a remedy."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from reknit.errors import (
    ShortageError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

from reknit.events.phase import now
from reknit.storage.base import ExistingError
from reknit.stores.hdfs.client import as_ours, of_class, plain, unreached
from reknit.stores.hdfs.store import HdfsStorage

NAMED: list[tuple[str, str, type[StorageError]]] = [
    ("java.io.FileNotFoundException", "File does not exist: /x", StorageNotFoundError),
    ("org.apache.hadoop.fs.FileAlreadyExistsException", "/x", ExistingError),
    ("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "The quota", StorageFullError),
    ("org.apache.hadoop.security.AccessControlException", "SIMPLE is not enabled", StoragePermissionError),
    ("java.lang.SecurityException", "Failed to obtain user group information", StoragePermissionError),
    ("org.apache.hadoop.security.token.SecretManager$InvalidToken", "expired", StoragePermissionError),
    ("org.apache.hadoop.ipc.StandbyException", "in state standby", StorageUnavailableError),
    ("org.apache.hadoop.hdfs.server.namenode.SafeModeException", "Cannot", StorageUnavailableError),
    ("java.io.IOException", "File /x could only be replicated to 0 nodes", StorageUnavailableError),
    ("org.apache.hadoop.HadoopIllegalArgumentException", "concat: source is empty", StorageError),
]


def test_what_hadoop_names_is_an_error_that_says_what_it_means() -> None:
    for name, message, expected in NAMED:
        error = of_class("write", "hdfs://nn/x", name, message)
        assert type(error) is expected, name
        assert "hdfs://nn/x" in str(error), name
        assert error.remedy, name


def test_an_error_is_told_in_full_without_the_stack_of_the_server() -> None:
    for reported, said in (
        ("Connection refused (os error 111)", "Connection refused (os error 111)"),
        ('RPCError("java.io.IOException", "one line")', "IOException: one line"),
        ('RPCError("java.io.IOException", "it is (in brackets)")', "IOException: it is (in brackets)"),
        ('RPCError("java.io.IOException", "one line\\n\\tat org.X.y(X.java:1)")', "IOException: one line"),
    ):
        assert plain(RuntimeError(reported)) == said


def test_too_few_open_files_are_a_shortage_of_this_process_and_not_a_cluster_out_of_reach() -> None:
    reported = "IO error occurred while communicating with HDFS: Too many open files (os error 24)"
    for error in (
        as_ours("write", "hdfs://nn/x", RuntimeError(reported)),
        unreached("join the parts of", "hdfs://nn/x", OSError(errno.EMFILE, "Too many open files")),
    ):
        assert type(error) is ShortageError
        assert "no further file can be opened" in error.message
        assert error.path == "hdfs://nn/x"


@pytest.mark.parametrize("kind", [StoragePermissionError, StorageFullError])
def test_the_time_of_a_cluster_that_takes_no_file_is_that_of_this_host(kind: type[StorageError]) -> None:
    def refuse(*_: object) -> None:
        raise kind("no file is made")

    store: Any = SimpleNamespace(
        place=SimpleNamespace(folder="/f"),
        placement=SimpleNamespace(write=refuse),
        client=SimpleNamespace(discard=lambda _: None),
    )
    before = now()
    assert before <= HdfsStorage.moment(store) <= now()
