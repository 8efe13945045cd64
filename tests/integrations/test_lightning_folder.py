"""The errors of a Lightning trainer about a folder with other work, before it trains there."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from reknit.errors import ReknitError, StorageError, UsageError
from reknit.integrations.lightning import step


def test_the_remedy_names_a_file_of_a_remote_folder_as_lightning_opens_it() -> None:
    root, files = f"memory://{uuid.uuid4().hex}", fsspec.filesystem("memory")
    files.pipe_file(f"{root}/last.ckpt", b"x")
    with pytest.raises(UsageError) as refused:
        step.refuse_others(root, files)
    (place,) = str(refused.value.remedy).split("'")[1:2]
    assert "://" in place
    assert fsspec.open(place).open().read() == b"x"


def test_every_error_of_a_check_reaches_the_other_ranks() -> None:
    def fails() -> None:
        raise StorageError("the store does not answer")

    found: ReknitError | None = step.first_error(fails)
    assert isinstance(found, StorageError)
