"""Sphinx, for `make docs`: every Markdown file is built, so that every link is checked.

The source is the repository's root, as README.md and its like link into docs/ and back. Links to
other hosts are not followed; `make docs` lists them.
"""

project = "vllm-eagle3-patch"
copyright = "the vllm-eagle3-patch authors"  # noqa: A001
extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/*.md", "deploy/**/*.md", "benchmarks/**/*.md"]
exclude_patterns = [".venv*", "build", "dist"]
myst_heading_anchors = 3
# The documents link to each other in their text; there is no table of contents beside that.
suppress_warnings = ["toc.not_included"]
html_theme = "alabaster"
html_theme_options = {"page_width": "70em", "nosidebar": True}
html_show_sphinx = False
