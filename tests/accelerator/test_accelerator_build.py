from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils import cpp_extension

from reknit.errors import UsageError
from tests.accelerator import why_not
from tests.accelerator.build import build

if TYPE_CHECKING:
    from pathlib import Path


def test_the_reason_is_told_where_it_cannot_be_built_and_programs_beside_python_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    seen: list[str] = []

    def is_ninja_available() -> bool:
        seen.append(os.environ["PATH"])
        return True

    monkeypatch.setattr(cpp_extension, "is_ninja_available", is_ninja_available)
    before = os.environ["PATH"]
    assert why_not() is None
    assert os.path.dirname(sys.executable) in seen[0].split(os.pathsep)
    assert os.environ["PATH"] == before
    for kind in ("cuda", "hip"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.version, kind, "13.0")
            assert "built for the CPU only" in str(why_not())
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    assert "pip install ninja" in str(why_not())
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    assert "'no-such-compiler'" in str(why_not())
    with pytest.raises(UsageError, match="no-such-compiler"):
        build()
