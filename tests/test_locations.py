"""A path object of any package means the place that it shows, or the error names the text to pass instead."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import reknit
from reknit.locations import is_location, local_path, location_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATE: dict[str, Any] = {"model": {"w": np.arange(10.0)}, "step": 5}


class CachedClient:
    """A client like those of cloudpathlib."""

    default: ClassVar[CachedClient | None] = None

    @classmethod
    def get_default_client(cls) -> CachedClient:
        cls.default = cls.default or cls()
        return cls.default


class CachedPath:
    """A path like those of cloudpathlib: also a path of this machine, to a copy in a temporary folder."""

    def __init__(self, url: str, client: CachedClient | None = None, cache: str = "/nowhere") -> None:
        self._url, self._cache = url, cache
        self.client = client or CachedClient.get_default_client()

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        os.makedirs(self._cache, exist_ok=True)
        return self._cache

    def joinpath(self, name: str) -> CachedPath:
        return CachedPath(f"{self._url}/{name}", self.client, self._cache)


class UniversalPath:
    """A path like those of universal_pathlib, which are not paths of this machine."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url, self.storage_options = url, options

    def __str__(self) -> str:
        return self._url

    def joinpath(self, name: str) -> UniversalPath:
        return UniversalPath(f"{self._url}/{name}", **self.storage_options)


class BucketPath(pathlib.PurePosixPath):
    """A path like those of s3path: its text is a plain path, and only its URI shows the bucket."""

    def as_uri(self) -> str:
        return f"mem:/{self}"


class LocalUniversal(UniversalPath):
    def __fspath__(self) -> str:
        return self._url.partition("://")[2]


@pytest.fixture(params=["cached", "universal", "bucket"])
def of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    """Return a function that makes a path object from the name of a place in memory."""
    kinds: dict[str, Callable[[str], Any]] = {
        "cached": lambda name: CachedPath(f"mem://{name}", cache=str(tmp_path / "cache")),
        "universal": lambda name: UniversalPath(f"mem://{name}"),
        "bucket": lambda name: BucketPath(f"/{name}"),
    }
    return kinds[request.param]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKNIT_MEMORY", str(tmp_path / "memory"))


def test_a_path_object_of_a_url_means_the_url_everywhere(of: Callable[[str], Any], tmp_path: Path) -> None:
    target: dict[str, Any] = {"model": {"w": np.zeros(10)}, "step": 0}
    reknit.save(of("runs/one"), STATE, step=1)
    reknit.load(of("runs/one"), target)
    assert (target["model"]["w"] == STATE["model"]["w"]).all()
    assert reknit.latest(of("runs")) == "mem://runs/one"
    reknit.promote(of("runs/one"), of("runs/two"))
    options = reknit.SaveOptions(promote_to=of("runs/four"))
    reknit.save(of("runs/three"), STATE, options=options, overwrite=True)
    assert reknit.verify(of("runs/four"), "data").ok
    reknit.load(of("runs/two"), target, options=reknit.LoadOptions(replicas=(of("runs/one"),)))
    with reknit.Checkpointer(of("steps"), keep=reknit.policies.latest(1), wait=True) as run:
        run.save(1, STATE)
        assert run.resume(target) == 2
    assert reknit.delete(of("runs/two")) > 0
    assert os.listdir(tmp_path) == ["memory"]


def test_a_background_save_goes_there_too(tmp_path: Path) -> None:
    path = CachedPath("mem://runs/one", cache=str(tmp_path / "cache"))
    reknit.save(path, STATE, wait=False).result()
    reknit.close()
    assert reknit.verify("mem://runs/one", "data").ok
    assert not (tmp_path / "cache").exists()


def test_a_url_that_is_not_all_that_a_path_stands_for_is_refused() -> None:
    for path, says in (
        (UniversalPath("mem://runs", anon=True), "anon"),
        (CachedPath("mem://runs", CachedClient()), "client of its own"),
    ):
        with pytest.raises(reknit.UsageError, match=says) as caught:
            reknit.save(path, STATE)  # type: ignore[arg-type]
        assert "'mem://runs'" in str(caught.value.remedy)


def test_paths_of_this_machine_stay_what_they_are(tmp_path: Path) -> None:
    class Named(type(tmp_path)):  # type: ignore[misc]
        pass

    for path in (tmp_path / "a", Named(tmp_path / "a"), LocalUniversal(f"file://{tmp_path}/a")):
        assert location_text(path) == str(tmp_path / "a")
        assert is_location(path)
    assert location_text("~/x") == "~/x"
    assert location_text(pathlib.PurePosixPath("a")) == "a"
    for other in (None, 1, {"a": 1}, np.zeros(1), b"a"):
        assert not is_location(other)


def test_files_that_are_of_this_machine_are_not_written_into_a_cache(tmp_path: Path) -> None:
    path = CachedPath("s3://bucket/events", cache=str(tmp_path / "cache"))
    for call in (
        lambda: local_path(path, "events go to"),
        lambda: reknit.save(tmp_path / "one", STATE, options=reknit.SaveOptions(events=path)),
        lambda: reknit.save(tmp_path / "one", STATE, options=reknit.SaveOptions(events="s3://bucket/events")),
        lambda: reknit.sinks.JsonLines(path),
    ):
        with pytest.raises(reknit.UsageError, match="events go to a file or folder of this machine"):
            call()
    assert not (tmp_path / "cache").exists()


BAD = os.fsdecode(b"bad\xff")


def test_a_place_whose_name_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = str(tmp_path / BAD / "x")
    calls: list[Callable[[], object]] = [
        lambda: reknit.save(path, STATE),
        lambda: reknit.save(path, STATE, wait=False).result(),
        lambda: reknit.load(path, dict(STATE)),
        lambda: reknit.open(path),
        lambda: reknit.latest(path),
        lambda: reknit.save(f"file://{tmp_path}/a%FFb", STATE),
        lambda: reknit.save(f"mem://{BAD}", STATE),
        lambda: reknit.save(f"s3://bucket/{BAD}", STATE),
        lambda: reknit.Checkpointer(path),
    ]
    for call in calls:
        with pytest.raises(reknit.UsageError, match="not valid Unicode") as caught:
            call()
        str(caught.value).encode()
        assert "rename" in str(caught.value.remedy)
    reknit.close()
    assert os.listdir(tmp_path) == []


def test_a_working_folder_whose_name_is_no_text_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / BAD).mkdir()
    monkeypatch.chdir(tmp_path / BAD)
    with pytest.raises(reknit.UsageError, match="not valid Unicode"):
        reknit.save("one", STATE)


def test_names_that_are_no_text_beside_checkpoints_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reknit.save(tmp_path / "one", STATE, step=1)
    reknit.save(tmp_path / "aside", STATE, step=2)
    (tmp_path / "aside").rename(tmp_path / BAD)
    (tmp_path / "one" / BAD).write_text("x")
    assert reknit.latest(tmp_path) == str(tmp_path / "one")
    assert [step.path for step in reknit.steps(tmp_path)] == [str(tmp_path / "one")]
    assert "is not valid Unicode" in caplog.text
    reknit.save(tmp_path / "one", STATE, step=1, overwrite=True)
    assert reknit.verify(tmp_path / "one", "data").ok
    reknit.delete(tmp_path / "one")
    assert os.listdir(tmp_path / "one") == [BAD]


def test_an_error_that_shows_such_a_name_can_be_sent_and_printed(tmp_path: Path) -> None:
    (tmp_path / BAD).mkdir()
    with pytest.raises(reknit.CheckpointNotFoundError) as caught:
        reknit.load(tmp_path / "bar", dict(STATE))
    assert r"bad\udcff" in str(caught.value)
    str(caught.value).encode()
    error = reknit.ReknitError("x", path=str(tmp_path / BAD))
    str(error.to_wire()).encode()
    str(error).encode()


def test_a_relative_path_is_refused_where_the_working_folder_was_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    calls: list[Callable[[], object]] = [
        lambda: reknit.save("x", STATE),
        lambda: reknit.save("x", STATE, wait=False).result(),
        lambda: reknit.load("x", STATE),
        lambda: reknit.latest("x"),
        lambda: reknit.Checkpointer("x"),
    ]
    for call in calls:
        with pytest.raises(reknit.UsageError, match="working folder of this process, which was removed"):
            call()
    reknit.save(tmp_path / "there", STATE, wait=False).result()
    assert reknit.latest(tmp_path) == str(tmp_path / "there")
