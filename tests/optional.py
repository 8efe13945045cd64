"""Marks that skip the tests of optional packages where these are not installed, without an import."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str, name: str) -> pytest.MarkDecorator:
    """Return the mark that skips tests where a package is missing.

    Every process that runs tests collects all of them, and a framework takes seconds to import.
    """
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{name} is not installed")
