"""The notebook is the tutorial, and a kernel of Jupyter runs its cells, with the outputs that it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.notebook import NOTEBOOK, PAGE, notebook_of, outputs_of, written
from tests.docs.outputs import HERE, normalised
from tests.docs.pages import ROOT
from tests.running.examples import is_night

FILE_WRITTEN = "Writing train.py"
"""The output of the cell that writes the script, which the page shows as a file."""


def test_the_notebook_is_made_from_the_tutorial() -> None:
    assert written(notebook_of(PAGE.read_text())) == NOTEBOOK.read_text(), "python -m docs.notebook writes it"


def test_the_notebook_names_no_folder_of_the_machine_that_made_it() -> None:
    outputs = outputs_of(notebook_of(PAGE.read_text()))
    assert HERE in outputs
    assert [path for path in (str(ROOT), str(Path.home()), "/tmp/") if path in outputs] == []


@pytest.mark.skipif(not is_night(), reason="at night: by day, tests/docs/test_snippets.py runs these cells")
def test_a_kernel_runs_the_notebook_with_the_outputs_that_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": programs, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "docs.notebook", "run", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    real = done.stdout.replace(str(tmp_path), HERE).replace(f"{FILE_WRITTEN}\n", "")
    assert normalised(real) == normalised(outputs_of(notebook_of(PAGE.read_text())))
