from __future__ import annotations

from importlib.metadata import version as installed_version

project = "domain-parallel"
author = "The domain-parallel authors"
copyright = author
release = version = installed_version("domain-parallel")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_inherit_docstrings = False  # torch's own docstrings link to labels of its guide
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # show a default as it is written, not as its repr of many lines
napoleon_google_docstring = False
napoleon_use_ivar = True  # an attribute section describes, autodoc indexes: else every field would be there twice
napoleon_use_rtype = False
napoleon_preprocess_types = False
suppress_warnings = [
    "ref.python",  # one name may be documented in a member and, as the same object, in the meta-package
]
