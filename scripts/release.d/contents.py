"""Compare the archives of a release with the files that git has: contents.py ARCHIVE ...

A wheel has the package and no tests, and a source archive has the files that pyproject.toml includes.
Neither has another file, nor the path of the machine that built it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "changelog.d", "docs", "examples", "scripts", "src", "tests")
# The build adds the metadata to each archive, and git's list of ignored files to a source archive.
ADDED_TO_SOURCES = {"PKG-INFO", ".gitignore"}
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt"}
NEEDED = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")


def tracked() -> list[str]:
    """Return the files that git has."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def expected_in_wheel(files: Collection[str], licenses: Collection[str]) -> set[str]:
    """Return the names in a wheel; those of its metadata without the name of their folder."""
    package = {name.removeprefix("src/") for name in files if name.startswith("src/")}
    return package | METADATA | {f"licenses/{name}" for name in licenses}


def expected_in_sources(files: Collection[str]) -> set[str]:
    """Return the names in a source archive, without the name of its folder."""
    beside = {"pyproject.toml", "constraints-dev.txt", "LICENSE", "CITATION.cff", "hatch_build.py"}
    return ADDED_TO_SOURCES | {
        name
        for name in files
        if name.split("/")[0] in FOLDERS or name in beside or ("/" not in name and name.endswith(".md"))
    }


def content(archive: Path) -> dict[str, bytes]:
    """Return the files of an archive, without the outer folder of sources or of metadata."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = {name: wheel.read(name) for name in wheel.namelist()}
        return {_bare(name) if ".dist-info/" in name else name: data for name, data in found.items()}
    with tarfile.open(archive) as sources:
        members = [member for member in sources if member.isfile()]
        return {_bare(member.name): _read(sources, member) for member in members}


def _bare(name: str) -> str:
    return PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix()


def _read(sources: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = sources.extractfile(member)
    return b"" if opened is None else opened.read()


def problems(found: Mapping[str, bytes], expected: Collection[str], paths: Collection[str]) -> Iterator[str]:
    """Yield each missing or further file, and each file with one of these paths of the machine."""
    yield from (f"lacks {name}" for name in sorted(set(expected) - found.keys()))
    yield from (f"has {name}, which does not belong there" for name in sorted(found.keys() - set(expected)))
    for name, data in sorted(found.items()):
        yield from (f"names {path} in {name}" for path in paths if path.encode() in data)


def metadata_problems(metadata: bytes) -> Iterator[str]:
    """Yield each field that the description of a package needs and these metadata lack."""
    fields = message_from_bytes(metadata)
    yield from (f"has no {name} in its metadata" for name in NEEDED if not fields[name])
    if not str(fields.get_payload()).strip():
        yield "has no description"


def main(arguments: list[str]) -> int:
    """Check the archives, and return the exit status."""
    files, wrong = tracked(), 0
    # Root has the same home on every machine, and tests name it.
    paths = {f"{ROOT}/", f"{Path.home()}/"} - {"/root/"}
    for archive in map(Path, arguments):
        found = content(archive)
        is_wheel = archive.suffix == ".whl"
        licenses = ["LICENSE", "src/reknit/monitor/assets/uPlot.LICENSE"]
        expected = expected_in_wheel(files, licenses) if is_wheel else expected_in_sources(files)
        listed = [*problems(found, expected, paths)]
        listed += metadata_problems(found.get("METADATA" if is_wheel else "PKG-INFO", b""))
        for problem in listed:
            print(f"{archive.name} {problem}", file=sys.stderr)
        print(f"{archive.name}: {len(found)} files, {archive.stat().st_size / 2**20:.1f} MiB")
        wrong += len(listed)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
