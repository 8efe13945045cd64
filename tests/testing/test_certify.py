"""The certificate of a store names exactly the promises that the store breaks, none for a good store."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StoragePermissionError
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage
from reknit.testing import certified
from reknit.testing.certify import certify, table
from tests.cli.command import Command
from tests.running.examples import at_night
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.options import Durability
    from reknit.storage.base import Storage


class Overwriting(ForwardingStorage):
    """A store that ignores `if_absent`, as some object stores do."""

    def around(self, inner: Storage, path: str) -> Storage:
        return Overwriting(inner)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        return self.inner.put(path, data, if_absent=False)


def open_overwriting(url: str, durability: Durability) -> Storage:
    storage = Overwriting(ProcessMemory("overwriting"))
    below = url.partition("://")[2].strip("/")
    return storage.sub(below) if below else storage


@at_night("the next test certifies a store that breaks two promises")
def test_a_store_that_holds_all_is_left_as_it_was(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKNIT_MEMORY", str(tmp_path))  # where no test waits for a disk
    code, reported, _ = Command(capfd)("certify-storage", "mem://certified")
    assert code == 0, reported
    (held,) = re.findall(r"(\d+) of (\d+) hold", reported)
    assert held[0] == held[1]
    assert int(held[0]) > 90
    assert "not asked" not in reported
    for part in ("contract", "faults"):
        assert re.search(rf"(?m)^{part} .* yes$", reported), part
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_a_store_does_not_hold_is_told() -> None:
    register("overwriting", open_overwriting)
    results = certify("overwriting://root")
    failed = {result.test for result in results if result.outcome == "failed"}
    assert failed == {"put writes and replaces", "put if absent has one winner"}, "the store inside holds all"
    reported = table(results)
    assert f"{len(results) - len(failed)} of {len(results)} hold" in reported
    assert "  NO" in reported


def test_options_of_a_url_stay_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert certified.below("s3://bucket/x/?retry_s=2", "y") == "s3://bucket/x/y?retry_s=2"
    assert certified.below("/folder?", "y") == "/folder?/y"
    opened: list[str] = []

    def kept(url: str, durability: Durability) -> Storage:
        opened.append(url)
        return ProcessMemory("kept").sub("x")

    register("kept", kept)
    monkeypatch.setattr(pytest, "main", lambda *_, **__: 0)
    certify("kept://x?part_mib=8")
    assert opened
    assert all(url.endswith("?part_mib=8") for url in opened)


def test_a_store_that_lets_nobody_in_is_told_before_anything_is_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(ProcessMemory):
        def folders(self) -> list[str]:
            raise StoragePermissionError("no credentials", remedy="get some")

    register("closed", lambda *_: Closed("closed"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the suite was run"))
    assert Command(capsys)("certify-storage", "closed://x") == (
        4,
        "",
        "reknit: no credentials\n  -> get some\n",
    )


def test_what_cannot_be_cleared_away_is_a_line_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str) -> None:
        raise StoragePermissionError(f"cannot list {url}")

    monkeypatch.setattr(certified, "clear", refused)
    monkeypatch.setattr(pytest, "main", lambda *_, **__: 0)
    (result,) = certify(str(tmp_path))
    assert (result.part, result.outcome) == ("scratch", "failed")
    assert result.why.startswith(f"cannot list {tmp_path}")


def test_a_store_that_nobody_knows_is_a_mistake_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    assert Command(capsys)("certify-storage", "nonsense://x").code == 2
