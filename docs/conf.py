"""Builds the site: `make docs`. Pages are plain markdown, so that they read as well on the code host."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parents[1])]

from odc_triton import __version__  # noqa: E402

project = "odc-triton"
author = "the authors of odc-triton"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "commands", "docstrings", "figures", "lengths"]
exclude_patterns = ["_ext", "check", "figures", "tables"]
nitpicky = True
# Types in signatures that this site does not describe stay plain code; all other references must resolve.
nitpick_ignore_regex = [("py:(class|obj|data|exc)", ".*")]
smartquotes = False  # `--option` would become a dash

myst_heading_anchors = 4
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False  # those of transformers are not ours to describe
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

highlight_language = "text"
pygments_style = "default"  # red and green in a diff
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = f"odc-triton {release}"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_ext" / "scorer.js")
html_copy_source = False
html_show_copyright = False
html_use_index = False  # the search finds more
html_domain_indices = False
