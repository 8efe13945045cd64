"""The words of a remedy, for tests that follow it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


def said(cause: Callable[[], Any], words: str) -> str:
    """Return the part of a remedy that matches `words`, from the error of a call."""
    with pytest.raises(BaseException, match=r"\n *-> ") as caught:  # errors of DCP derive from it alone
        cause()
    found = re.search(words, str(caught.value).partition("-> ")[2])
    assert found is not None, str(caught.value)
    return found[0]
