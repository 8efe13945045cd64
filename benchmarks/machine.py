"""On which machine, and with which software, were figures measured?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def machine() -> str:
    """Return the cores, the processor and the memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores, {model or platform.machine()}, {memory:.0f} GiB"


def software(*packages: str) -> str:
    """Return the system and the versions of the packages that are installed."""
    versions = [f"{platform.system()} {platform.release()}", f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)
