"""The explorer's page: one HTML file of a trace that runs anywhere, offline, and sends nothing."""

from __future__ import annotations

import base64
import html as markup
import logging
import os
from pathlib import Path
from typing import Any, Unpack

from regard.engine.call.options import check_names
from regard.inspection.explorer.page_document import FORMAT, PageOptions, Payload, write_json
from regard.inspection.explorer.payload import collect
from regard.inspection.explorer.shell import load_shell
from regard.inspection.explorer.thumbnails import draw_png, draw_text
from regard.inspection.visible_text import show_text
from regard.paths import read_path, replacing

NOTEBOOK_MB = 4.0
_LOG = logging.getLogger(__name__)  # without a handler, on stderr


def write(
    trace: Any, path: str | os.PathLike[str], *, max_mb: float = 20, **options: Unpack[PageOptions]
) -> Path:
    """Write a page that shows a trace: one file, which loads nothing and opens without a network.

    Short traces, up to 2 million weights in all, are carried weight by weight. Of longer ones each head has
    a picture of at most 64 x 64 blocks and profiles; pinned heads also one of at most 512 x 512 blocks and
    the largest weights of each row. Where that is too much, a fixed order says what goes first; the page and
    the log say what went. The same trace makes the same bytes.

    Args:
        trace: of `capture` or `traces.load`.
        path: of the file; a page that is there is replaced, at once.
        max_mb: how large the file may be, in millions of bytes.
        **options: what the page shows, by the names below; any of them may be left out.
        compare: a second trace, to be laid beside the first.
        title: None means the trace's.
        pinned: how many heads are carried in detail, those with the clearest labels and the lowest
            entropy; or which: pairs of a call's number and a head. 8 by default.
        training: what a run logged: {"title", "curves": [{"name", "unit", "points" (2, n): steps and
            values, "split"}], "maps": [{"name", "unit", "rows": names, "steps", "values" (rows, steps)}]}
        positions: position tables (positions, width) by name, drawn beside what the calls tell of them.
        cut: heads that were cut in `compare`, pairs of a call's number and a head: Compare opens on the one
            after them that changed most.

    Returns:
        The path.

    Raises:
        FileExistsError: what lies at the path is not such a page.
        FileNotFoundError: its folder does not exist.
        ValueError: what cannot be left out is larger than max_mb; a head in `pinned` or `cut` that does not
            exist.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from regard import attend, inspection, masks
        >>> from regard.inspection.explorer import pages
        >>> x = jnp.eye(4)[None]
        >>> with inspection.capture() as trace:
        ...     _ = attend(x, x, x, mask=masks.causal())
        >>> pages.write(trace, tempfile.mkdtemp() + "/page.html").name
        'page.html'
    """
    target = read_path("path", path)
    _check_target(target)
    payload, page = fill_page(trace, max_mb=max_mb, **options)
    with replacing(target) as draft:
        draft.write_bytes(page)
    for note in payload.document["notes"]:
        _LOG.warning("%s: %s", target.name, note)
    return target


def html(trace: Any, **settings: Any) -> str:
    """Return the text of the page that `write` writes, from the same arguments without the path."""
    return fill_page(trace, **settings)[1].decode()


def bundle(trace: Any, *, max_mb: float = NOTEBOOK_MB) -> dict[str, Any]:
    """Return what a notebook shows of a trace, by MIME type.

    text/html is the page, of at most `max_mb`, in a frame that may run its own script and nothing else;
    image/png, as base64, is for where scripts do not run, text/plain for where pictures are not shown either.
    """
    name = markup.escape(show_text(trace.title))
    try:
        page = markup.escape(html(trace, max_mb=max_mb, pinned=4))
        shown = (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" title="{name}"'
            ' style="width:100%;height:760px;border:1px solid #8884;border-radius:6px"></iframe>'
        )
    except ValueError as error:
        reason = markup.escape(show_text(str(error)))
        advice = "too large to be shown here. Write it to a file with explore(path)."
        shown = f"<p>{name}: {advice}<br>{reason}</p>"
    picture = base64.b64encode(draw_png(trace)).decode()
    return {"text/html": shown, "image/png": picture, "text/plain": draw_text(trace)}


def fill_page(
    trace: Any,
    *,
    compare: Any = None,
    title: str | None = None,
    max_mb: float | None = 20,
    served: bool = False,
    **shown: Any,
) -> tuple[Payload, bytes]:
    """Return the data of a page and the page, from the arguments of `write`.

    With `max_mb` None it may be of any size. A page that is `served` asks for chunks, and for finer numbers.
    """
    check_names(shown, PageOptions)
    if max_mb is not None and not max_mb > 0:
        raise ValueError(f"max_mb: expected more than 0, got {max_mb}")
    shell = load_shell()
    name = markup.escape(show_text(trace.title if title is None else title))
    connect = "'self'" if served else "'none'"
    traces = [trace] if compare is None else [trace, compare]
    empty = shell.fill(title=name, document="", chunks="", connect=connect).encode()
    most = None if max_mb is None else max_mb * 1e6
    payload = collect(traces, title=title, max_bytes=most, shell_bytes=len(empty), served=served, **shown)
    chunks = "" if served else "".join(payload.blocks())
    document = write_json(payload.document)
    return payload, shell.fill(title=name, document=document, chunks=chunks, connect=connect).encode()


def _check_target(target: Path) -> None:
    if not target.exists():
        if not target.parent.is_dir():
            raise FileNotFoundError(f"path: expected a folder at {target.parent}, none is there; make it")
        return
    if target.is_dir():
        raise FileExistsError(f"path: expected a file to write, got the folder {target}; name a file in it")
    content = target.read_bytes()
    if content and not (f'"format":"{FORMAT}"'.encode() in content and b'id="regard-document"' in content):
        hint = "what is there is something else: name another file, or remove it first"
        raise FileExistsError(f"path: expected no file, or an explorer page to replace, at {target}; {hint}")
