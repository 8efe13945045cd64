"""Tests that need a device keep their own outcomes, even if the process where they run fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import why_not
from tests.running.examples import is_night

ROOT = Path(__file__).parents[2]

CONFTEST = """
pytest_plugins = ["tests.running.elsewhere"]
"""

NEED_A_DEVICE = """
import ctypes
import pytest
import torch
from tests.devices import on_simulated_cuda

@pytest.fixture(scope="module")
def opened():
    yield 1

def test_before(opened):
    assert not torch.cuda.is_available()

@on_simulated_cuda
def test_works(opened, accelerator):
    assert torch.ones(1, device="cuda").is_cuda

@on_simulated_cuda
def test_fails():
    assert torch.ones(1, device="cuda").item() == 2

@on_simulated_cuda
def test_leaves_an_error(accelerator):
    accelerator.fail_copy()
    with accelerator.held(torch.cuda.current_stream()):  # or a call in here may notice the error already
        torch.ones(1, device="cuda").add_(torch.ones(1, device="cuda")).clone()
        torch.empty(1, pin_memory=True).copy_(torch.ones(1, device="cuda"), non_blocking=True)

@on_simulated_cuda
def test_crashes():
    ctypes.string_at(torch.ones(1, device="cuda").data_ptr(), 1)

@on_simulated_cuda
def test_goes_on():
    assert torch.ones(1, device="cuda").item() == 1

@on_simulated_cuda
def test_is_skipped():
    pytest.skip("for a reason")

def test_after(opened):
    assert not torch.cuda.is_available()
"""


def outcomes(folder: Path) -> dict[str, str]:
    """Run the tests above, and return the outcome of each."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name in ("first", "second"):
        (folder / f"test_{name}.py").write_text(NEED_A_DEVICE)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = device: device\naddopts = --import-mode=importlib\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-m", "pytest", "-rA", "-o", "faulthandler_timeout=0"]
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=250
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_first\.py::(\w+)", done.stdout, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[\d+\] (?:test_first\.py:\d+: )?(.*)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {name: outcome for outcome, name in found} | {"skipped": " ".join(skipped)}


@pytest.mark.skipif(not is_night(), reason="at night: by day the tests themselves run in that way")
def test_each_test_elsewhere_has_its_own_outcome_and_a_crash_ends_only_one(tmp_path: Path) -> None:
    assert why_not() is None
    found = outcomes(tmp_path)
    assert "for a reason" in found.pop("skipped")
    assert found == {
        "test_before": "PASSED",
        "test_works": "PASSED",
        "test_fails": "FAILED",
        "test_leaves_an_error": "PASSED",
        "test_crashes": "ERROR",
        "test_goes_on": "PASSED",
        "test_after": "PASSED",
    }
