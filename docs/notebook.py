"""Make the tutorial a notebook, or run that notebook as Jupyter does.

python -m docs.notebook             write docs/tutorial.ipynb from docs/tutorial.md, with its outputs
python -m docs.notebook run FOLDER  run its cells in a folder, and print the outputs
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE, NOTEBOOK = HERE / "tutorial.md", HERE / "tutorial.ipynb"
LIMIT_S = 200

FIRST = "*This is [the tutorial](tutorial.md) as a notebook. Run its cells in order, in an empty folder.*"
FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```\n", re.MULTILINE | re.DOTALL)
CAPTION = re.compile(r":caption: (?P<name>\S+)\n\n")


def notebook_of(page: str) -> dict[str, Any]:
    """Return the notebook of a page: texts, snippets, files and commands as cells, with the outputs shown."""
    cells = [_cell("markdown", FIRST)]
    end = 0
    for fence in FENCE.finditer(page):
        language, text = fence["language"], fence["text"]
        if language == "text" and cells[-1]["cell_type"] == "code" and not page[end : fence.start()].strip():
            cells[-1]["outputs"] = _printed(text)
        elif made := _code_cells(language, text):
            cells += [_cell("markdown", page[end : fence.start()].strip()), *made]
        else:
            continue  # a part of the text around it
        end = fence.end()
    cells.append(_cell("markdown", page[end:].strip()))
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:02}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _code_cells(language: str, text: str) -> list[dict[str, Any]]:
    """Return the cells of a block that is run: a snippet, a file that is written, or commands."""
    if language == "python":
        return [_cell("code", text.strip())]
    if language == "{code-block} python" and (caption := CAPTION.match(text)):
        return [_cell("code", f"%%writefile {caption['name']}\n{text[caption.end() :].strip()}")]
    if language == "console":
        found = []
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(_cell("code", f"%%bash\n{command}"))
            found[-1]["outputs"] = _printed(output)
        return found
    return []


def _cell(kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": "", "metadata": {}, "source": _lines(source)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def _printed(text: str) -> list[dict[str, Any]]:
    return [{"name": "stdout", "output_type": "stream", "text": _lines(text)}] if text else []


def _lines(text: str) -> list[str]:
    """Return a text as the format keeps it, so that a change of a line is one line of a diff."""
    return text.splitlines(keepends=True)


def written(notebook: dict[str, Any]) -> str:
    """Return the file of a notebook."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def outputs_of(notebook: dict[str, Any]) -> str:
    """Return all that the cells have printed, one after the other."""
    found = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", "")) for output in found)


def run(folder: str) -> str:
    """Run the notebook with a kernel in a folder, and return what the cells print."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    place = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=LIMIT_S, resources=place).execute()
    return outputs_of(notebook)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        print(run(sys.argv[2]), end="")
    else:
        NOTEBOOK.write_text(written(notebook_of(PAGE.read_text())))
