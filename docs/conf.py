"""How the pages are built: ``python -m sphinx -W -b html docs docs/_build``."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the pages are of this copy, whichever is installed

from cupynorm import __version__  # noqa: E402

project = "cupynorm"
release = version = __version__
copyright = "the authors of cupynorm, Apache-2.0"

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build", "jupyter_execute"]  # the latter is written by myst_nb
default_role = "py:obj"  # what docstrings have in single backticks
html_theme = "furo"
html_title = f"cupynorm {release}"
html_show_sourcelink = False
html_copy_source = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # their outputs are those of a GPU; tests/test_examples.py runs them
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have the types
suppress_warnings = ["mystnb.unknown_mime_type"]

# Sphinx reads no page outside its folder: the notebooks, and the scripts they name, are copied.
EXAMPLES = Path(__file__).parent / "examples"
EXAMPLES.mkdir(exist_ok=True)
for source in (ROOT / "examples").glob("*.[ip]*"):
    shutil.copy(source, EXAMPLES / source.name)


def _links(app: object, page: str, text: list[str]) -> None:
    """Have links to files of the repository lead to their page, or else name the file."""

    def of_page(link: re.Match[str]) -> str:
        path = link["path"].removeprefix("../")
        if path.startswith("examples/"):
            return f"[{link['text']}]({path})"
        if path.startswith("docs/"):  # from a notebook
            return f"[{link['text']}](../{path.removeprefix('docs/')})"
        name = f"`{path}`"
        return name if link["text"].strip("`/") in path else f"{link['text']} ({name})"

    # A notebook is JSON, a line a string.
    words = r'[^\]"\n]+' if page.startswith("examples/") else r"[^\]]+"
    link = rf"(?<!!)\[(?P<text>{words})\]\((?P<path>\.\./[^)#\s]+)(?:#[^)\s]*)?\)"
    text[0] = re.sub(link, of_page, text[0])


def setup(app: object) -> None:
    app.connect("source-read", _links)  # type: ignore[attr-defined]
