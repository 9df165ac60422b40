"""A live page: a model reads texts that are typed, heads cut or not, and what it attends to is shown."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np

from regard.inspection.call_numbers import number_calls
from regard.inspection.explorer import shell
from regard.inspection.explorer.codes import dump_json
from regard.inspection.explorer.exact_tiles import IsWanted, demand_reader
from regard.inspection.explorer.page_document import write_json
from regard.inspection.explorer.pages import fill_page
from regard.inspection.explorer.server import Serving
from regard.inspection.explorer.sites import Answer, Explorer, RefusalError, Site, check_port
from regard.inspection.visible_text import show_text

MOST_TRACES, MOST_VIEWS = 16, 4  # that are kept
MOST_CUT, MOST_PARTS, MOST_EDGES = 4096, 8, 60  # heads; pairs of writers; edges of a graph
CUT_WORDS = {"zero": "switched off", "half": "at half", "double": "doubled", "mean": "at their mean"}
CUT_WORDS |= {"uniform": "reading evenly", "patch": "from"}
# The same by `Change`.
_SHARES = {"half": ["share=0.5"], "double": ["share=-1.0"]}
_CHANGES = {"uniform": "query=0.0", "mean": "output=lambda output: output.mean(-2, keepdims=True)"}
_CHANGES |= {"patch": "source=1"}
_CUT = r"\d{1,4}\.\d{1,4}(:\d{1,7}(-\d{1,7})?)?"
_POLL_SECONDS = 0.05


def serve_live(
    record: Callable[..., Any],
    *,
    text: str = "",
    title: str = "attention",
    port: int = 0,
    cuts: bool = False,
    explain: Callable[..., Any] | None = None,
    trace: Callable[..., Any] | None = None,
    **options: Any,
) -> Serving:
    """Serve a page with a box for a text, and one for a changed text or cut heads that it is compared with.

    Only this machine is served, as by `serve`. One text is read at a time, and none that nobody waits for.

    Args:
        record: gives the `Trace` of a text, or a ValueError that is shown in the page.
        text: what stands in the box at first.
        title: of the page.
        port: to listen on; 0 takes one that is free.
        cuts: whether record takes `cut` and `by`, as `Recorder.record` does, and `source`, a text; the page
            then asks for heads.
        explain: gives the `ScoreParts` of (text, layer, head, query, key), a cell, as `decompose_score` does.
        trace: gives the `Paths` of (text, query), as `trace_paths`, and texts of the target and the tokens.
        **options: training and positions, as in `pages.write`.

    Returns:
        A `Serving`, already listening.

    Raises:
        OSError, ValueError: as `serve`.

    Example:
        >>> import jax.numpy as jnp, json, urllib.request
        >>> from regard import attend, inspection
        >>> from regard.inspection.explorer.live import serve_live
        >>> def record(text):
        ...     x = jnp.eye(len(text))[None]
        ...     with inspection.capture(tokens=list(text), title=text) as trace:
        ...         attend(x, x, x)
        ...     return trace
        >>> with serve_live(record) as page:
        ...     answer = json.load(urllib.request.urlopen(page.url + "read?text=abc&text=abd"))
        >>> answer["view"], answer["tokens"]
        ('view/1-2/', [3, 3])
    """
    check_port(port)
    settings = {"text": text, "cuts": list(CUT_WORDS) if cuts else [], "why": explain is not None}
    settings["paths"] = trace is not None
    return Serving(Site(_LiveExplorer(record, explain, trace, settings, title, options).read), port)


class _TextError(Exception):
    """A text that the model cannot read."""


class _Reading(NamedTuple):
    """A text to be read, what is cut, as of `Recorder.record`, and the text that patches come from."""

    text: str
    cut: tuple[tuple[int, ...], ...] = ()
    by: str = "zero"
    source: str | None = None
    names: tuple[str, ...] = ()  # of what is cut, by layers

    def of_calls(self, calls: Sequence[Any]) -> _Reading:
        """Return the reading that cuts the calls of the layers named."""
        numbers = number_calls(calls)
        # Of calls in order, a record may show some.
        if numbers == [*range(len(calls))]:
            return self
        for name, (layer, *_) in zip(self.names, self.cut, strict=True):
            if layer not in numbers:
                expected = f"heads of the layers with weights, {', '.join(map(str, numbers))}"
                raise _TextError(f"cut: expected {expected}; got {name}")
        return self._replace(cut=tuple((numbers.index(layer), *ends) for layer, *ends in self.cut))

    @property
    def python(self) -> str:
        """Return the line that does the same to a model of Regard, or of a library that calls `attend`."""
        new = _CHANGES.get(self.by, "output=0.0")
        blocks: dict[tuple[int, ...], list[str]] = {}  # by the one row that they change, if any
        calls = dict.fromkeys((call, tuple(ends) * (len(ends) == 1)) for call, _, *ends in self.cut)
        for call, rows in calls:
            cut = [(head, tuple(ends)) for number, head, *ends in self.cut if number == call]
            heads = tuple(head for head, ends in cut if ends == rows)
            edges = tuple((head, *ends) for head, ends in cut if len(ends) == 2)
            fields = [f"{new}, heads={heads}"] * bool(heads) + [f"rows={rows}"] * bool(rows)
            fields += [f"edges={edges}"] * bool(edges) + _SHARES.get(self.by, [])
            blocks.setdefault(rows, []).append(f"{call}: inspection.Change({', '.join(fields)})")
        changes = ", ".join(f"inspection.intervene({{{', '.join(block)}}})" for block in blocks.values())
        tokens = "tokens" if self.source is None else "jnp.concatenate([tokens, source])"
        return f"with {changes}: model({tokens})"


class _LiveExplorer:
    """The live page, and explorers of what was read."""

    def __init__(
        self,
        record: Callable[..., Any],
        explain: Callable[..., Any] | None,
        trace: Callable[..., Any] | None,
        settings: dict[str, Any],
        title: str,
        options: dict[str, Any],
    ):
        self._record, self._explain, self._trace, self._options = record, explain, trace, options
        self._cuts = settings["cuts"]
        self._questions: dict[str, Callable[[str, IsWanted], dict[str, Any]]] = {"read": self._read_texts}
        self._questions |= {"why": self._explain_cell} if explain is not None else {}
        self._questions |= {"paths": self._trace_paths} if trace is not None else {}
        script = shell.join_modules("live.js", "regard-live.js")
        style = shell.load_shell().style + shell.shrink_style(shell.read_source("live.css"))
        parts = {"TITLE": escape(show_text(title)), "STYLE": style, "SETTINGS": write_json(settings)}
        self._page = shell.fill_places(shell.read_source("live.html"), parts | {"SCRIPT": script}).encode()
        self._policy = shell.write_policy("'self'", script) + "; frame-src 'self'; frame-ancestors 'none'"
        self._turn = threading.Lock()
        self._numbers = itertools.count(1)
        self._find_trace = functools.lru_cache(MOST_TRACES)(self._record_text)
        self._views: OrderedDict[str, Explorer] = OrderedDict()

    def read(self, path: str, query: str, is_wanted: IsWanted) -> Answer:
        """Return the page, what a text became, or what the explorer of some texts answers."""
        if not path:
            html = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": self._policy}
            return self._page, html
        kind, _, rest = path.partition("/")
        if not rest and kind in self._questions:
            try:
                answer = self._questions[kind](query, is_wanted)
            except _TextError as error:
                answer = {"refused": str(error)}
            return dump_json(answer), {"Content-Type": "application/json"}
        name, _, inner = rest.partition("/")
        explorer = self._views.get(name) if kind in ("view", "save") else None
        if explorer is None or "/" not in rest:
            raise RefusalError("there is nothing here, or no more", 404)
        if kind == "view":
            return explorer.read(inner, query, is_wanted)
        # What is looked at as a file, which needs no model and no server.
        page = fill_page(explorer.traces[0], **{**explorer.options, "pinned": 8})[1]
        name = re.sub(r"[^A-Za-z0-9]+", "-", explorer.traces[-1].title)[:60].strip("-") or "attention"
        file = {"Content-Type": "text/html", "Content-Disposition": f'attachment; filename="{name}.html"'}
        return page, file

    def _read_texts(self, question: str, is_wanted: IsWanted) -> dict[str, Any]:
        readings = _parse_readings(question, self._cuts)
        with self._take_turn(is_wanted):
            calls = self._find_trace(readings[0])[1].calls
            readings = [reading.of_calls(calls) for reading in readings]
            numbers, recorded = [], []
            for reading in readings:
                number, trace = self._find_trace(reading)
                numbers.append(str(number))
                recorded.append(trace)
                demand_reader(is_wanted)
            # Of a source, what it predicts is told, no more.
            name, traces = "-".join(numbers[:2]), recorded[:2]
            if name not in self._views:
                options = self._options if len(traces) == 1 else {}
                if len(traces) > 1 and readings[1].cut:
                    # Of layers that are cut, a record may show some.
                    calls = enumerate(traces[1].calls)
                    heads = {(number, head) for number, call in calls for head in range(call.heads)}
                    options = {"cut": sorted(heads & {ends[:2] for ends in readings[1].cut})}
                # Few heads are carried in detail: the server has them all.
                self._views[name] = Explorer(traces, framed=True, pinned=0, **options)
            self._views.move_to_end(name)
            while len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
        lengths = [max((call.keys for call in trace.calls), default=0) for trace in traces]
        answer = {"view": f"view/{name}/", "tokens": lengths}
        if all(trace.predictions is not None for trace in recorded):
            answer["predicted"] = [_tell_predictions(trace) for trace in recorded]
        if len(readings) > 1 and readings[1].cut:
            answer["python"] = readings[1].python
        return answer

    def _explain_cell(self, question: str, is_wanted: IsWanted) -> dict[str, Any]:
        assert self._explain is not None
        fields = ("text", "layer", "head", "query", "key")
        text, layer, head, query, key = _parse_question("why", question, fields)
        with self._take_turn(is_wanted):
            calls = self._find_trace(_Reading(text))[1].calls
            demand_reader(is_wanted)
            if layer not in (numbers := number_calls(calls)):
                raise RefusalError("why: there is no such layer")
            call = calls[numbers.index(layer)]
            cell = {"layer": call.layer, "head": head, "query": query, "key": key}
            parts = _ask(self._explain, text, **cell)
        arguments = ", ".join(f"{name}={number}" for name, number in cell.items())
        python = f"inspection.decompose_score(model, tokens, {arguments})"
        permitted = bool(call.permit([query], [key])[head, 0, 0])
        answer = {"score": parts.score, "permitted": permitted, "python": python}
        return answer | {"parts": parts.largest(MOST_PARTS)}

    def _trace_paths(self, question: str, is_wanted: IsWanted) -> dict[str, Any]:
        assert self._trace is not None
        text, query = _parse_question("paths", question, ("text", "query"), r"-1|\d{1,9}")
        with self._take_turn(is_wanted):
            numbers = number_calls(self._find_trace(_Reading(text))[1].calls)
            paths, target, tokens = _ask(self._trace, text, query)
        edges = [dataclasses.asdict(edge) for edge in paths.connected(most=MOST_EDGES)]
        for edge in edges:
            edge["layer"] = dict(enumerate(numbers)).get(edge["call"], edge["call"])
        positions = {paths.query, *(edge[end] for edge in edges for end in ("query", "key"))}
        answer = {"edges": edges, "query": paths.query, "target": target, "logit": paths.logit}
        answer["layers"] = numbers
        answer["tokens"] = {position: tokens[position] for position in sorted(positions)}
        return answer | {"python": f"inspection.trace_paths(model, tokens, query={paths.query})"}

    def _record_text(self, reading: _Reading) -> tuple[int, Any]:
        cut: dict[str, Any] = {"cut": reading.cut, "by": reading.by} if reading.cut else {}
        how = CUT_WORDS[reading.by]
        if reading.source is not None:
            cut["source"] = reading.source
            how += f" “{self._find_trace(_Reading(reading.source))[1].title}”"
        try:
            trace = _ask(self._record, reading.text, **cut)
        except _TextError as error:
            # A record names calls, not layers.
            for ends, name in zip(reading.cut, reading.names, strict=True):
                if str(error).endswith(end := f"got {_spell_cut(*ends)}"):
                    raise _TextError(f"{str(error).removesuffix(end)}got {name}") from error
            raise
        if cut:
            trace = dataclasses.replace(trace, title=f"{trace.title} ({' '.join(reading.names)} {how})")
        return next(self._numbers), trace

    @contextmanager
    def _take_turn(self, is_wanted: IsWanted) -> Iterator[None]:
        """Wait for those before; whoever is gone by then gives up the turn."""
        while not self._turn.acquire(timeout=_POLL_SECONDS):
            demand_reader(is_wanted)
        try:
            demand_reader(is_wanted)
            yield
        finally:
            self._turn.release()


def _ask(read: Callable[..., Any], text: str, *rest: Any, **options: Any) -> Any:
    """Return what is read of a text, or raise a _TextError that says why it cannot be read."""
    try:
        return read(text, *rest, **options)
    except ValueError as error:
        raise _TextError(str(error)) from error


def _tell_predictions(trace: Any) -> dict[str, Any]:
    """Return the loss of a text, of each token, in nats, and what comes after it, likeliest first."""
    predictions = trace.predictions
    coming = predictions.next_log_probability
    last = zip(predictions.tokens[-1, -1], predictions.probabilities[-1, -1], strict=True)
    loss = None if coming is None or not len(coming) else -float(coming.mean())
    texts = next((call.query_tokens.texts for call in trace.calls if call.query_tokens is not None), ())
    losses = [] if coming is None else (-np.asarray(coming, float)).tolist()
    costs = list(zip(texts[1:], losses, strict=False))
    likeliest = [[predictions.texts[token], float(chance)] for token, chance in last]
    return {"loss": loss, "costs": costs, "next": likeliest}


def _parse_readings(query: str, cuts: Sequence[str]) -> list[_Reading]:
    """Return what a page asks for: one text or two, of which the last may have heads cut.

    By "patch" it is the first one, and the last one the source of its heads.
    """
    parts = parse_qsl(query, keep_blank_values=True)
    texts = [value for name, value in parts if name == "text"]
    others = {name: value for name, value in parts if name != "text"}
    expected = {"cut", "by"} if cuts else set()
    if len(texts) not in (1, 2) or len(parts) != len(texts) + len(others) or not others.keys() <= expected:
        raise RefusalError(f"read: expected text=... once or twice{' and cut, by' * bool(cuts)}")
    cut = _parse_cut(others.get("cut", ""))
    by, names = others.get("by", "zero"), tuple(itertools.starmap(_spell_cut, cut))
    if cut and by not in cuts:
        raise RefusalError(f"by: expected one of {', '.join(cuts)}")
    if not cut:
        return [_Reading(text) for text in texts]
    if by == "patch":
        if len(texts) == 1:
            raise _TextError('by: "patch" takes heads\' output from a second text: press "Change a word"')
        return [_Reading(texts[0]), _Reading(texts[0], cut, by, texts[1], names), _Reading(texts[1])]
    return [_Reading(texts[0]), _Reading(texts[-1], cut, by, names=names)]


def _parse_question(kind: str, question: str, names: Sequence[str], number: str = r"\d{1,9}") -> tuple:
    """Return what a page asks about: a text, and numbers, as they may be written."""
    fields = dict(parse_qsl(question, keep_blank_values=True))
    numbers = [fields.get(name, "") for name in names[1:]]
    if set(fields) != set(names) or not all(re.fullmatch(number, word) for word in numbers):
        raise RefusalError(f"{kind}: expected {', '.join(names)}")
    return fields["text"], *map(int, numbers)


def _parse_cut(cut: str) -> tuple[tuple[int, ...], ...]:
    names = dict.fromkeys(cut.replace(",", " ").split())
    if len(names) > MOST_CUT or not all(re.fullmatch(_CUT, name) for name in names):
        raise RefusalError("cut: expected layer.head or layer.head:query-key, such as 2.5 3.1:7-2")
    return tuple(tuple(map(int, re.split(r"[.:-]", name))) for name in names)


def _spell_cut(layer: int, head: int, *ends: int) -> str:
    return f"{layer}.{head}" + ":" * bool(ends) + "-".join(map(str, ends))
