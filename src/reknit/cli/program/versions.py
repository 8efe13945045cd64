"""The installed versions of reknit, of its format, and of related packages."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from reknit import plugins
from reknit.format.versions import FORMAT_VERSION, OLDEST_READABLE
from reknit.storage.registry import ENTRY_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = ("torch", "jax", "numpy", "pyarrow")
_CLIENTS = {"obstore": "s3://, gs://, az://", "hdfs-native": "hdfs://", "fsspec": "other URLs"}


class PrintVersions(argparse.Action):
    """The option that prints the versions and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the versions, and exit."""
        print("\n".join(version_lines()))
        parser.exit()


def version_lines() -> Iterator[str]:
    """Yield a line for each version, from metadata of packages: none of them is imported."""
    yield f"reknit {version('reknit')}"
    yield f"checkpoint format {FORMAT_VERSION} (reads {OLDEST_READABLE} to {FORMAT_VERSION})"
    yield f"Python {platform.python_version()}"
    for name in _PACKAGES:
        yield f"{name} {_installed(name)}"
    for name, schemes in _CLIENTS.items():
        yield f"{name} {_installed(name)} (for {schemes})"
    for entry in plugins.installed(ENTRY_POINTS).values():
        if entry.dist is not None:
            yield f"{entry.dist.name} {entry.dist.version} (for {entry.name}://)"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"
