"""How Sphinx builds the documentation: ``make docs``."""

import sys
from pathlib import Path

from docutils.nodes import document
from sphinx.application import Sphinx

import shardids

sys.path.insert(0, str(Path(__file__).parent))
import commands

project = "shardids"
author = "the shardids developers"
project_copyright = "the shardids developers"
version = release = shardids.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_extra_path = ["comparison-charts.html"]
html_title = "shardids"
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Key": "Key"}
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app: Sphinx) -> None:
    """Keep the decisions out of the search: they are for those who change shardids."""

    def mark(app: Sphinx, doctree: document) -> None:
        page = app.env.docname
        if page.startswith("decisions/"):
            app.env.metadata[page]["nosearch"] = ""

    app.connect("doctree-read", mark)


# The pages of the commands are not committed: they repeat the code's words.
commands.write()
