"""Settings of the documentation. Nothing is fetched: no remote inventories, fonts or scripts."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import nmsparse  # noqa: E402  (found through the path above)

project = "nmsparse"
author = "the nmsparse authors"
copyright = "the nmsparse authors, Apache-2.0"
version = release = nmsparse.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "mathml",
    "recipe_cards",
    "measured",
    "example_index",
    "integration_index",
]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

default_role = "literal"  # docstrings write `output` for names of products
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"nmsparse {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["nmsparse.css"]
html_show_sphinx = False
html_copy_source = False
