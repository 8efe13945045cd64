"""Files that are made of others without their bytes passing by, of stores that can do that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageError
from reknit.storage.base import CopiesFiles
from reknit.testing.storage_suite.probes import listed, pattern, read, write
from reknit.testing.storage_suite.suite import Suite

if TYPE_CHECKING:
    from reknit.storage.base import Storage

NBYTES = 10_000
OLD, NEW = "model/old", "model/new"


class Pair:
    """The folders of two steps in one store, of which the later takes over files of the earlier."""

    def __init__(self, earlier: Storage, later: Storage, copies: CopiesFiles) -> None:
        self.earlier, self.later, self._copies = earlier, later, copies

    def copy(self, path: str = NEW, source: str = OLD, nbytes: int = NBYTES) -> bool:
        """Take over a file of the earlier folder."""
        return self._copies.copy_from(self.earlier, source, path, nbytes)


class CopyingSuite(Suite):
    """The contract of `CopiesFiles`; stores that are none are passed over."""

    @pytest.fixture
    def pair(self, storage: Storage) -> Pair:
        """Return two folders, with a file in the first."""
        earlier, later = storage.sub("1"), storage.sub("2")
        if not isinstance(later, CopiesFiles):
            pytest.skip("this store copies no files")
        write(earlier, OLD, pattern(NBYTES))
        pair = Pair(earlier, later, later)
        if not pair.copy("probe"):
            pytest.skip("this store refuses to copy files here")
        return pair

    def test_a_copy_is_a_file_of_its_own(self, pair: Pair) -> None:
        """It keeps the bytes if the other changes or goes, and the other stays when it goes."""
        assert pair.copy()
        assert pair.copy("again", source=OLD)
        pair.later.delete("again")
        assert read(pair.earlier, OLD, 0, NBYTES) == pattern(NBYTES)
        write(pair.earlier, "stays", b"1")  # a folder that a store was opened in may stay when it is empty
        pair.earlier.delete(OLD)
        assert read(pair.later, NEW, 0, NBYTES) == pattern(NBYTES)
        assert listed(pair.later) == {"probe": NBYTES, NEW: NBYTES}

    def test_a_copy_of_a_copy_is_as_good(self, pair: Pair) -> None:
        """A file may be taken over from step to step."""
        write(pair.later, "other", b"1")
        assert isinstance(pair.earlier, CopiesFiles)
        assert pair.earlier.copy_from(pair.later, "probe", "back", NBYTES)
        assert pair.earlier.get("back", limit=NBYTES) == pattern(NBYTES)

    @pytest.mark.parametrize(
        ("source", "nbytes"), [("nothing", NBYTES), ("model", NBYTES), (OLD, NBYTES - 1)]
    )
    def test_what_is_not_there_as_expected_is_not_copied(self, pair: Pair, source: str, nbytes: int) -> None:
        """A source that is gone, a folder, another size: the answer is no, and nothing is there."""
        assert not pair.copy(source=source, nbytes=nbytes)
        assert listed(pair.later) == {"probe": NBYTES}
        write(pair.later, NEW, b"1")  # the name is free

    def test_a_name_that_is_taken_is_refused(self, pair: Pair) -> None:
        """A file that has the name stays as it is."""
        write(pair.later, NEW, b"1")
        with pytest.raises(StorageError):
            pair.copy()
        assert pair.later.get(NEW, limit=10) == b"1"

    @pytest.mark.parametrize("path", ["../2/up", "/etc/x", ""])
    def test_no_path_leads_out_of_the_folders(self, pair: Pair, path: str) -> None:
        """Neither where a file comes from, nor where it goes to."""
        with pytest.raises(StorageError):
            pair.copy(path)
        with pytest.raises(StorageError):
            pair.copy(source=path)

    def test_another_kind_of_store_has_nothing_to_copy(self, pair: Pair) -> None:
        """It is not an error: the file is written then."""
        copies = pair.later
        assert isinstance(copies, CopiesFiles)
        assert not copies.copy_from(Elsewhere(), OLD, NEW, NBYTES)  # type: ignore[arg-type]
        assert listed(pair.later) == {"probe": NBYTES}


class Elsewhere:
    """A store of a kind that no other store recognizes."""
