"""Sphinx's settings. `make docs` builds the site into build/docs/html.

The pages are Markdown (MyST), so that GitHub shows them too. autodoc reads Python's API from the
installed package, breathe reads that of C++ from what doxygen made of include/shardstep.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "shardstep"
copyright = "the shardstep authors, BSD-3-Clause"
version = release = (ROOT / "VERSION").read_text().strip()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe"]
exclude_patterns = ["_*"]
nitpicky = False  # torch's classes are not ours to document

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub's

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "transformers"]  # which integrations need, and this does not
napoleon_numpy_docstring = False
default_role = "literal"  # docstrings have single backticks

breathe_projects = {"shardstep": str(ROOT / "build" / "docs" / "doxygen" / "xml")}
breathe_default_project = "shardstep"
breathe_default_members = ("members",)

smartquotes_action = "De"  # dashes, not quotes
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"shardstep {release}"
html_static_path = ["_static"]
html_css_files = ["shardstep.css"]
html_show_sourcelink = False
pygments_style = "friendly"
highlight_language = "none"
