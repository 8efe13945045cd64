"""The pages of the documentation, as things to run: their fenced blocks, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!-- (?P<name>\S+\.\w+) -->\n\Z")
_CAPTION = re.compile(r":caption:[ ]*(?P<name>\S+)[ ]*\n\n")


class Block(NamedTuple):
    """A fenced block: its language, its text, the line where that begins, the file that it should be in."""

    language: str
    text: str
    line: int
    file: str | None = None


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page.

    One with a caption, or right after a comment that is the name of a file, is the content of that file.
    """
    found = []
    for match in _FENCE.finditer(page):
        language, text = match["language"].strip(), match["text"]
        line = page.count("\n", 0, match.start("text")) + 1
        caption = _CAPTION.match(text)
        if caption is not None:
            language = language.removeprefix("{code-block}").strip()
            found.append(Block(language, text[caption.end() :], line + 2, caption["name"]))
        else:
            named = _COMMENT.search(page, 0, match.start())
            found.append(Block(language, text, line, None if named is None else named["name"]))
    return found


def commands(block: Block) -> list[str]:
    """Return the commands of a console block: the text after a dollar sign."""
    return [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
