"""Sphinx settings."""

import re
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

from docs import error_catalog

project = "reknit"
author = "The reknit authors"
version = release = installed_version("reknit")
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "docs.parameters"]
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
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# A copy of a console block has its commands without the prompt, and not what they print.
copybutton_prompt_text = "$ "
# What a `text` block shows is read: trees, messages, layouts of files.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"


class DarkPictures(SphinxTransform):
    """Put `NAME-dark.png` beside each `NAME.png` that has one; the theme shows the one that suits."""

    default_priority = 200

    def apply(self) -> None:
        """Add a second image after each image with a dark variant."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for light in list(self.document.findall(nodes.image)):
            uri = Path(light["uri"])
            dark = uri.with_name(f"{uri.stem}-dark{uri.suffix}")
            if (folder / dark).is_file():
                other = light.copy()
                other["uri"] = dark.as_posix()
                light["classes"].append("only-light")
                other["classes"].append("only-dark")
                light.parent.insert(light.parent.index(light) + 1, other)


class BrokenNames(SphinxPostTransform):
    """Let long names in tables break where a reader would break them: after `/`, `_`, `.` and the like."""

    default_priority = 900
    formats = ("html",)
    longest = 20

    def run(self, **kwargs: object) -> None:
        """Put an optional break between the parts of each long name."""
        for cell in self.document.findall(nodes.entry):
            for text in list(cell.findall(nodes.Text)):
                if max(map(len, text.split()), default=0) > self.longest:
                    first, *others = re.split(r"(?<=[/_.:=,(])(?=[^\s/_.:=,(])", text)
                    parts: list[nodes.Node] = [nodes.Text(first)]
                    for part in others:
                        parts += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]
                    text.parent.replace(text, parts)


class ErrorCatalog(SphinxDirective):
    """A section for each public error."""

    def run(self) -> list[nodes.Node]:
        """Parse the sections as Markdown."""
        self.env.note_dependency(error_catalog.__file__)
        lines = [line for code in error_catalog.codes() for line in error_catalog.error_lines(code)]
        section = nodes.section()
        self.state.nested_parse(StringList(lines, error_catalog.__file__), 0, section, match_titles=True)
        return section.children


def setup(app: Sphinx) -> None:
    """Add what these pages need beyond extensions."""
    app.add_directive("error-catalog", ErrorCatalog)
    app.add_transform(DarkPictures)
    app.add_post_transform(BrokenNames)
