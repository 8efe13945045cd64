from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reknit import plugins
from reknit.errors import MissingExtraError, UnknownSchemeError, UsageError
from reknit.storage import registry
from reknit.storage.local.memory import MemoryStorage
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage, register
from reknit.testing.storage_suite import write
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.storage.base import Storage


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.setattr(registry, "factories", dict(registry.factories))


def test_plain_paths_and_path_objects_are_folders(tmp_path: Path) -> None:
    for place in (str(tmp_path / "a b%20"), tmp_path / "a b%20"):
        storage = open_storage(place)
        assert isinstance(storage, LocalStorage)
        assert storage.url == str(tmp_path / "a b%20")
    assert open_storage("runs/1").url == str(tmp_path / "home" / "runs" / "1")


def test_a_colon_behind_the_first_slash_is_part_of_a_name(tmp_path: Path) -> None:
    assert open_storage("./s3:x").url == str(tmp_path / "home" / "s3:x")
    assert open_storage("runs/12:30").url == str(tmp_path / "home" / "runs" / "12:30")
    assert open_storage(tmp_path / "a:b").url == str(tmp_path / "a:b")
    assert open_storage("my_run:1").url == str(tmp_path / "home" / "my_run:1")


def test_a_tilde_is_the_home(tmp_path: Path) -> None:
    assert open_storage("~/runs").url == str(tmp_path / "home" / "runs")
    assert open_storage("a/~").url == str(tmp_path / "home" / "a" / "~")
    with pytest.raises(UsageError, match="unknown user"):
        open_storage("~nobody-of-this-name/x")


def test_a_file_url_is_a_folder_whose_name_is_percent_decoded() -> None:
    for url in ("file:///a/b", "file://localhost/a/b", "FILE:///a/b", "file:/a/b", "file:///a/%62"):
        assert open_storage(url).url == "/a/b"
    assert open_storage("file:///a%20b/%C3%A9%3F").url == "/a b/é?"


def test_a_wrong_url_of_this_host_is_refused() -> None:
    files = ("//", "", "a", "//host/a", "//a", "///a?b", "///a#b", "///a%00", "//[x")
    memory = ("//", "///", "name", "/name")
    for url in (*(f"file:{rest}" for rest in files), *(f"mem:{rest}" for rest in memory)):
        with pytest.raises(UsageError):
            open_storage(url)


def test_a_memory_url_is_a_store_in_memory() -> None:
    storage = open_storage("mem://registry/a/b/")
    assert isinstance(storage, MemoryStorage)
    assert storage.url == "mem://registry/a/b"
    write(storage, "x", b"1")
    assert open_storage("mem://registry").get("a/b/x", limit=1) == b"1"


def test_a_store_that_is_missing_is_named() -> None:
    with pytest.raises(UnknownSchemeError, match="'nosuch'") as caught:
        open_storage("nosuch://bucket/x")
    # Other tests of this process may have registered schemes, which are named as well.
    assert all(
        known in str(caught.value.remedy) for known in ("a plain path", "file://", "mem://", "hdfs://")
    )
    assert "reknit.storage" in str(caught.value.remedy)


def test_an_unknown_store_never_becomes_a_folder(tmp_path: Path) -> None:
    unknown = ("nosuch://nn/x", "nosuch:/x", "my-store://x", "my_store://x", "://x", "ss3:/x")
    for url in (*unknown, Path("nosuch://nn/x")):
        with pytest.raises(UnknownSchemeError):
            open_storage(url)
    assert list((tmp_path / "home").iterdir()) == []


def test_a_remote_store_without_two_slashes_is_refused() -> None:
    for url in ("s3:bucket", "gs:/bucket/x", "az:x", "hdfs:/nn/x"):
        with pytest.raises(UsageError, match="two slashes"):
            open_storage(url)


def test_a_place_must_be_given() -> None:
    places: tuple[Any, ...] = ("", b"/x")
    for place in places:
        with pytest.raises(UsageError, match="place"):
            open_storage(place)


def test_durability_reaches_the_store(tmp_path: Path) -> None:
    for place in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(UsageError, match="durability"):
            open_storage(place, durability="fast")  # type: ignore[arg-type]


def test_a_registered_scheme_is_opened_by_its_factory() -> None:
    opened: list[tuple[str, Durability]] = []

    def factory(url: str, durability: Durability) -> Storage:
        opened.append((url, durability))
        return ProcessMemory("registered")

    register("vault", factory)
    register("vault", factory)
    assert open_storage("vault://a/b", durability="process").url == "process://registered"
    assert open_storage("VAULT://a").url == "process://registered"
    assert opened == [("vault://a/b", "process"), ("VAULT://a", "power")]
    with pytest.raises(UsageError, match="two slashes"):
        open_storage("vault:/a")


def test_a_scheme_that_is_taken_or_impossible_is_refused() -> None:
    for scheme in ("file", "mem", "Upper", "", "a/b", "1x"):
        with pytest.raises(UsageError):
            register(scheme, lambda url, durability: ProcessMemory("x"))


def install(folder: Path, scheme: str, target: str) -> None:
    """Write the metadata of an installed package with an entry point."""
    metadata = folder / f"{scheme}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {scheme}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[reknit.storage]\n{scheme} = {target}\n")


def test_an_installed_package_serves_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "tape", "reknit_tape_for_tests:open_tape")
    (tmp_path / "site" / "reknit_tape_for_tests.py").write_text(
        "from tests.storage.process_memory import ProcessMemory\n"
        "def open_tape(url, durability):\n"
        "    return ProcessMemory('tape').sub(durability)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert open_storage("tape://x").url == "process://tape/power"


def test_an_installed_package_that_is_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "broken", "reknit_package_that_is_not_there:open")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(MissingExtraError, match="reknit_package_that_is_not_there"):
        open_storage("broken://x")


@pytest.mark.parametrize("what", ["3", "open_nothing"])
def test_an_installed_package_that_returns_no_store_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = f"void{len(what)}"
    install(tmp_path / "site", scheme, f"reknit_void_for_tests:{'made' if what == '3' else what}")
    (tmp_path / "site" / "reknit_void_for_tests.py").write_text(
        "made = 3\ndef open_nothing(url, durability):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(UsageError, match=f"the distribution {scheme} brings {scheme!r}") as caught:
        open_storage(f"{scheme}://x")
    assert caught.value.remedy == f"correct or uninstall {scheme}"


@pytest.mark.parametrize(
    ("python", "says"),
    [((3, 10), "run it with Python 3.11 or newer"), ((3, 11), r"pip install 'reknit\[gcs\]'")],
)
def test_an_object_store_without_its_client_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for module in [name for name in sys.modules if name.startswith("reknit.storage.object.store")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    with pytest.raises(MissingExtraError, match="needs the package obstore") as caught:
        open_storage("gs://bucket/x")
    assert re.search(says, str(caught.value))
    assert ("pip install" in str(caught.value)) == (python >= (3, 11)), "which would install nothing"


def test_entry_points_are_not_looked_up_for_known_schemes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(_: str) -> None:
        raise AssertionError("nobody asked for an unknown scheme")

    monkeypatch.setattr(plugins, "installed", lookup)
    open_storage(tmp_path)
    open_storage("mem://x")
    with pytest.raises(AssertionError):
        open_storage("other://x")


def test_importing_the_registry_makes_nothing(tmp_path: Path) -> None:
    code = "import reknit.storage.registry, threading; print(threading.active_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "home", capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert list((tmp_path / "home").iterdir()) == []
