"""Which addresses do the metadata of the package have?  Those of the repository that builds it.

A copy that no workflow builds has none, since no file records where the project is published.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if TYPE_CHECKING:
    from collections.abc import Mapping


class ProjectUrls(MetadataHookInterface):
    """The hook that hatchling calls for the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the addresses."""
        metadata["urls"] = urls(os.environ)


def urls(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses of a repository by these variables of its workflow, or nothing."""
    owner, slash, name = variables.get("GITHUB_REPOSITORY", "").partition("/")
    if not slash:
        return {}
    source = f"{variables.get('GITHUB_SERVER_URL', 'https://github.com')}/{owner}/{name}"
    return {
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Source": source,
        "Issues": f"{source}/issues",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
    }
