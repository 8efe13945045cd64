"""One page as one file: its parts, its data, and the policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCRIPTS = ("uPlot.iife.min.js", "common.js")
_STYLES = ("uPlot.min.css", "page.css")
_PARTS = ("<!--STYLES-->", "<!--SCRIPTS-->", "<!--DATA-->", "<!--POLICY-->")


@lru_cache(maxsize=8)
def page_file(body: str, scripts: tuple[str, ...]) -> str:
    """Return the page without data, from a file of this folder, with `scripts` after the common ones.

    A page without data requests them from its server.
    """
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy(scripts, frames=False)}">'
    styles = "".join(f"<style>{_text(name)}</style>" for name in _STYLES)
    code = "".join(f"<script>{_text(name)}</script>\n" for name in (*_SCRIPTS, *scripts))
    text = _text(body)
    for mark, part in zip(_PARTS, (styles, code, None, policy), strict=True):
        if part is not None:
            text = text.replace(mark, part)
    return text


def with_data(page: str, data: Any) -> str:
    """Return a page with its data, as a block of JSON, which browsers never run."""
    # Names in the data come from strangers, and must not end the block.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace(_PARTS[2], f'<script type="application/json" id="data">{text}</script>')


@lru_cache(maxsize=8)
def content_policy(scripts: tuple[str, ...], *, frames: bool = True) -> str:
    """Return the content policy of a page: only the scripts and styles of this package, by their digests.

    `frames` adds the rule about frames of other pages, which only the header of an answer may have.
    """
    code = " ".join(f"'{_digest(name)}'" for name in (*_SCRIPTS, *scripts))
    styles = " ".join(f"'{_digest(name)}'" for name in _STYLES)
    rules = (
        f"default-src 'none'; script-src {code}; style-src {styles}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"{rules}; frame-ancestors 'none'" if frames else rules


def packed(values: NDArray[Any], dtype: str) -> str:
    """Return numbers as base64, for a typed array of the page."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _digest(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode()


@lru_cache(maxsize=32)
def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()
