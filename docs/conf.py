"""How the site is built: ``make docs``. Nothing on a page is fetched from elsewhere, and its search works offline."""

from __future__ import annotations

import microbatch

project = "microbatch"
author = "The microbatch authors"
project_copyright = "The microbatch authors, Apache-2.0"
release = version = microbatch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"microbatch {release}"
html_show_sphinx = False
html_copy_source = False
