"""Every hostile file is refused with a typed error, in little time and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from reknit.errors import CorruptError, VersionError
from reknit.format.index import decode_index, encode_index
from reknit.format.manifest_file import decode_manifest, encode_manifest
from tests.attacks import hostile_documents, hostile_index
from tests.attacks.__main__ import refuse
from tests.format.samples import sample_index, sample_manifest

MIB = 1 << 20


def test_what_the_attacks_start_from_is_accepted() -> None:
    assert (
        decode_manifest(hostile_documents.signed(encode_manifest(sample_manifest())[:-29]))
        == sample_manifest()
    )
    for good in (hostile_index._good(), hostile_index.plain_index()):
        decode_index(hostile_index._with_footer(good, lambda footer: None))
        decode_index(hostile_index._with_page(good, 7, {}))
    decode_index(encode_index(sample_index()))
    decode_index(hostile_index._parquet(1))
    refuse(
        "headers",
        hostile_documents.header_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 4),
    )


def test_a_newer_format_is_told_apart_from_damage() -> None:
    for name in ("version_of_the_future", "unknown_feature"):
        with pytest.raises(VersionError) as caught:
            refuse("manifests", dict(hostile_documents.changed_manifests())[name])
        assert not isinstance(caught.value, CorruptError)


def run_alone(*arguments: str) -> list[dict[str, Any]]:
    """Run the whole corpus in a process of its own, which reports every case as a line of JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux to measure memory")
def test_every_hostile_file_is_refused_and_takes_little_memory() -> None:
    reports = {f"{report['kind']}/{report['name']}": report for report in run_alone("memory")}
    assert len(reports) >= 300
    assert [name for name, report in reports.items() if report["error"] is None] == []
    assert [name for name, report in reports.items() if len(report["error"]) >= 2000] == []
    # an index is compressed; small values take more memory than bytes; of the rest there are a few copies
    most = {"blobs": (96 * MIB, 32), "indexes": (256 * MIB, 0)}
    greedy = {}
    for name, report in reports.items():
        base, factor = most.get(report["kind"], (32 * MIB, 8))
        if report["nbytes"] > base + factor * report["size"]:
            greedy[name] = report["nbytes"] // MIB
    assert not greedy


def test_no_changed_index_crashes_the_interpreter() -> None:
    (report,) = run_alone("mutate")
    assert report["tried"] >= 1000
    assert report["refused"] > report["tried"] // 2


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux to limit memory")
def test_an_index_is_read_or_refused_with_any_amount_of_memory_and_never_ends_the_process() -> None:
    codes = [report["code"] for report in run_alone("shortage")]
    assert set(codes) == {0, 1}
    assert codes[-1] == 0
