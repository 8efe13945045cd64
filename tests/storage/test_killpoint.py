"""A store whose URL has its faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageFullError, UsageError
from reknit.storage.registry import recipe
from reknit.testing.faulty_storage import Fault
from tests.storage.killpoint import faulty_url, open_faulty, register_faulty

if TYPE_CHECKING:
    from pathlib import Path


def test_the_faults_of_a_url_happen_in_the_folder_that_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "a b?c#d%20"
    url = faulty_url(folder, Fault("full", 2, "put"), Fault("error", 9))
    assert url.startswith("faulty://full@put:2,error@9/")
    store = open_faulty(url, "process")
    assert store.put("x", b"1", if_absent=True)
    with pytest.raises(StorageFullError):
        store.put("y", b"2", if_absent=True)
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_a_url_may_hold_no_fault(tmp_path: Path) -> None:
    store = open_faulty(faulty_url(tmp_path), "process")
    assert store.put("x", b"1", if_absent=True)
    assert store.fired == []


def test_a_stall_lasts_until_the_gate_is_there(tmp_path: Path) -> None:
    gate = tmp_path / "gate?"
    store = open_faulty(faulty_url(tmp_path / "store", Fault("stall", 1), gate=gate), "process")
    thread = threading.Thread(target=lambda: store.put("x", b"1", if_absent=True))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.touch()
    thread.join(30)
    assert os.listdir(tmp_path / "store") == ["x"]


def test_a_kill_ends_the_process_that_opened_the_url(tmp_path: Path) -> None:
    opened = "from tests.storage.killpoint import open_faulty; store = open_faulty(sys.argv[1], 'process')"
    code = f"import sys; {opened}; store.put('x', b'', if_absent=True)"
    url = faulty_url(tmp_path, Fault("kill", 1))
    assert subprocess.run([sys.executable, "-c", code, url], check=False).returncode == -9


def test_an_agent_knows_how_to_open_it(tmp_path: Path) -> None:
    register_faulty()
    assert recipe(faulty_url(tmp_path)).factory == "tests.storage.killpoint:open_faulty"


def test_what_is_no_faulty_url_is_refused() -> None:
    for url in ("faulty://kill/x", "faulty://melt@1/x", "faulty://kill@x/x", "faulty://none"):
        with pytest.raises(UsageError, match="faulty://"):
            open_faulty(url, "process")


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(UsageError, match="absolute"):
        faulty_url("step_7")
