"""Sphinx settings."""

from importlib.metadata import version as installed_version

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "reknit"
author = "The reknit authors"
version = release = installed_version("reknit")
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings put names in single backticks; show these as code, not as citations.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False

html_theme = "furo"
html_title = f"reknit {release}"
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Show diagrams as they are written; pages on GitHub draw them."""
    app.add_lexer("mermaid", TextLexer)
