"""``reknit --version``: the versions for a report of a fault."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from reknit.format.checksum import FORMAT_VERSION

if TYPE_CHECKING:
    import pytest

    from tests.cli.command import Command


def test_versions_of_reknit_its_format_and_what_it_works_with_are_printed(command: Command) -> None:
    ran = command("--version")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"reknit {version('reknit')}"
    assert lines[1].startswith(f"checkpoint format {FORMAT_VERSION} ")
    assert f"Python {platform.python_version()}" in lines
    assert f"torch {version('torch')}" in lines
    assert f"numpy {version('numpy')}" in lines
    named = [line.split()[0] for line in lines]
    assert {"obstore", "hdfs-native", "fsspec"} <= set(named)


def test_what_is_not_installed_is_said(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "obstore":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("reknit.cli.main.version", absent)
    assert "obstore is not installed (for s3://, gs://, az://)" in command("--version").out.splitlines()
