"""Sphinx builds the site from the repository's root: a link is then the same on the site and where the code is read."""

import re
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from laplace_plus import __version__

project = "laplace_plus"
author = "the laplace_plus developers"
copyright = author  # noqa: A001 - the name that Sphinx asks for
release = version = __version__

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "benchmarks/results/*.md",
    "benchmarks/study/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["build", "dist", "runs", "**/.*", "**/__pycache__", "laplace_plus", "tests", "*.egg-info"]
exclude_patterns += ["docs/_templates"]
suppress_warnings = ["ref.python"]  # the name of an attribute that several classes have
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}  # generated pages take the first

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]

nb_execution_mode = "off"  # notebooks hold their pictures; tests/test_notebooks.py runs them
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

templates_path = [str(Path(__file__).parent / "_templates")]
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # arguments are described in words, with shapes
_OPTIONAL = ("botorch", "gpytorch", "lightning", "linear_operator", "sklearn", "torch_geometric", "transformers")
autodoc_mock_imports = [name for name in _OPTIONAL if find_spec(name) is None]
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"laplace_plus {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_site"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"


def mathml(tex: str, as_block: bool) -> str:
    """The formula, with a thin space behind names of functions, which docutils leaves out."""
    return tex2mathml(tex, as_block=as_block).replace(
        "&ApplyFunction;</mo>", '&ApplyFunction;</mo><mspace width="0.16em"/>'
    )


def inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Formulas are MathML, which browsers draw themselves: pages ask nothing of the network."""
    translator.body.append(mathml(node.astext(), False))
    raise nodes.SkipNode


def displayed_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """As for formulas in a line."""
    translator.body.append(f'<div class="math">{mathml(node.astext(), True)}</div>')
    raise nodes.SkipNode


def tidy(app: Sphinx, name: str, source: list[str]) -> None:
    """Without the empty line that ends doctests, and with numbers that keep to the line of their errors."""
    source[0] = re.sub(r"^(```python\n.*?\n)\n```$", r"\1```", source[0], flags=re.MULTILINE | re.DOTALL)
    source[0] = re.sub(
        r"^\|.*",
        lambda row: row[0].replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"),
        source[0],
        flags=re.MULTILINE,
    )


def setup(app: Sphinx) -> None:
    """Registers the way in which formulas are drawn, and what is done to pages first."""
    app.add_html_math_renderer("mathml", (inline_math, None), (displayed_math, None))
    app.connect("source-read", tidy)
