"""How Sphinx builds the documentation: ``make docs``."""

import shardids

project = "shardids"
author = "the shardids developers"
project_copyright = "the shardids developers"
version = release = shardids.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "decisions/README.md"]

html_theme = "furo"
html_extra_path = ["comparison-charts.html"]
html_title = "shardids"
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Key": "Key"}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
