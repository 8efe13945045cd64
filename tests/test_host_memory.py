from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reknit.system import available_nbytes

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, *, free_kib: int, groups: str) -> None:
    write(root / "proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {free_kib} kB")
    write(root / "proc/self/cgroup", groups)


def group(folder: Path, *, limit: object, usage: int, cold: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", usage)
    write(folder / "memory.stat", f"anon 5\ninactive_file {cold}\nactive_file 7")


def group_v1(folder: Path, *, limit: int, usage: int, cold: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", usage)
    write(folder / "memory.stat", f"inactive_file 999999\ntotal_inactive_file {cold}")


def test_the_tightest_control_group_on_the_way_up_counts(tmp_path: Path) -> None:
    machine(tmp_path, free_kib=1000, groups="0::/job/rank")
    names = ("job/rank", "job", ".")
    for tight in names:
        for name in names:
            group(tmp_path / "sys/fs/cgroup" / name, limit="max", usage=10)
        group(tmp_path / "sys/fs/cgroup" / tight, limit=5000, usage=2000, cold=300)
        assert available_nbytes(tmp_path) == 3300, tight


def test_a_container_that_is_told_its_path_on_the_host_finds_its_limit_at_the_top(tmp_path: Path) -> None:
    machine(tmp_path, free_kib=1000, groups="0::/kubepods/pod7/abc")
    group(tmp_path / "sys/fs/cgroup", limit=9000, usage=1000)
    assert available_nbytes(tmp_path) == 8000


def test_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    machine(tmp_path, free_kib=1000, groups="9:name=systemd:/\n4:cpu,memory:/job\n1:cpu:/other\n0::/")
    top = tmp_path / "sys/fs/cgroup/memory"
    group_v1(top, limit=(1 << 63) - 4096, usage=100)
    group_v1(top / "job", limit=7000, usage=3000, cold=50)
    assert available_nbytes(tmp_path) == 4050


def test_a_group_without_limit_leaves_what_the_machine_has_and_one_beyond_its_limit_nothing(
    tmp_path: Path,
) -> None:
    machine(tmp_path, free_kib=1000, groups="0::/job")
    assert available_nbytes(tmp_path) == 1_024_000
    group(tmp_path / "sys/fs/cgroup/job", limit="max", usage=10)
    assert available_nbytes(tmp_path) == 1_024_000
    group(tmp_path / "sys/fs/cgroup/job", limit=1000, usage=1500)
    assert available_nbytes(tmp_path) == 0


def test_a_system_without_these_files_is_asked_otherwise(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_nbytes(tmp_path) <= total
    assert 0 < available_nbytes() <= total
