"""The links of a Markdown page, and the anchors that links can name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

_MARKDOWN = MarkdownIt("commonmark").enable("table")


class Link(NamedTuple):
    """A link or a picture: the line of its paragraph, its text, and where it points."""

    line: int
    text: str
    target: str


def links(page: str) -> list[Link]:
    """Return the links and pictures of a page, from top to bottom."""
    found = []
    for line, tokens in _inlines(page):
        for place, token in enumerate(tokens):
            if token.type == "image":
                found.append(Link(line, token.content, str(token.attrs["src"])))
            elif token.type == "link_open":
                end = next(k for k in range(place, len(tokens)) if tokens[k].type == "link_close")
                text = "".join(each.content for each in tokens[place:end])
                found.append(Link(line, text.strip(), str(token.attrs["href"])))
    return found


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page, as forges and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.+)$", page, re.MULTILINE):
        (inline,) = _MARKDOWN.parseInline(heading)
        text = "".join(token.content for token in inline.children or [])
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        times = found[anchor] = found.get(anchor, -1) + 1
        if times:
            found[f"{anchor}-{times}"] = 0
    return set(found)


def _inlines(page: str) -> Iterator[tuple[int, list[Token]]]:
    """Yield the tokens of each paragraph, heading and cell, with its line."""
    line = 1
    for token in _MARKDOWN.parse(page):
        if token.map is not None:
            line = token.map[0] + 1
        if token.type == "inline":
            yield line, token.children or []
