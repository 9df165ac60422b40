"""Programs drawn by a seed and a number: the same wherever they run."""

import re

import numpy as np

from program import Program

LENGTHS, LONG = (1, 7, 53, 131), 1031  # on both sides of tiles, of pieces, and of where dense is chosen
FAMILIES = {"attend": 14, "small tiles": 2, "merge": 1.5, "cache": 1.5, "linear": 2, "read": 1, "ring": 0.7}
STATISTICS = ("weights", "scores", "lse", "max_score", "argmax", "entropy")
POSITIVE = "1 + rng({name!r}).random({shape})"


class Draft:
    """A program while it is drawn: many texts are drawn, of which it keeps one, and the arrays in it."""

    def __init__(self, seed, number, poison):
        self.rng, self.poison, self.shapes = np.random.default_rng([seed, number]), poison, {}
        vars(self).update(vars(Program(seed, number, self.pick(FAMILIES))))
        self.traced, self.jit = self.chance(0.5), self.chance(0.1 if self.family == "cache" else 0.9)
        getattr(self, f"_{self.family.replace(' ', '_')}")()

    # Choices, and arrays by the text that draws them.

    def pick(self, choices):
        """Pick one of several, or of the keys of a dictionary of weights."""
        weights = np.array([*choices.values()] if isinstance(choices, dict) else [1] * len(choices), float)
        return [*choices][self.rng.choice(len(weights), p=weights / weights.sum())]

    def chance(self, share):
        return bool(self.rng.random() < share)

    def whole(self, low, high):
        return int(self.rng.integers(low, max(low, high) + 1))

    def real(self, name, shape, text="rng({name!r}).normal(size={shape})", dtype=None):
        """Add an array that is differentiated, and return its name."""
        self.shapes[name], self.dtypes[name] = shape, dtype or self.sums
        self.arrays[name] = f"np.asarray({text.format(name=name, shape=shape)})"
        return name

    def data(self, text):
        """Add an array of integers, `@` being where its numbers come from, and return its name."""
        name = f"data{len(self.arrays)}"
        self.arrays[name] = text.replace("@", f"rng({name!r})")
        return name

    def rows(self, *rest):
        """Return the shape of data for each batch row, or for all."""
        return (*(self.batch[:1] if self.chance(0.5) else ()), *rest)

    # What a call is made of.

    def sizes(self, axes=None, square=None, lengths=LENGTHS, most=6):
        """Draw shapes and dtypes of query, key and value."""
        own = self.pick({"float32": 9, "bfloat16": 4, "float16": 2, "float64": 3})
        self.sums = "float64" if own == "float64" else "float32"
        self.long = lengths == LENGTHS and axes is None and self.chance(0.03)
        lengths, any_front = (LONG,) if self.long else lengths, axes is None
        self.T, self.S = self.pick(lengths), self.pick(lengths)
        self.T = self.S if square or (square is None and self.chance(0.6)) else self.T
        axes = 1 if self.long else self.pick({0: 1, 1: 1, 2: 5, 3: 1}) if axes is None else axes
        heads = 2 if self.long or axes == 3 else self.pick([n for n in (1, 2, 3, 6) if n <= most])
        shared = self.pick([n for n in range(1, heads + 1) if heads % n == 0])
        batch = ((), (), (2,), (2, 3))[axes]
        heads = heads if axes else 1
        self.leading, self.heads = (*batch, heads) if axes else (), heads
        self.batch = self.leading[:1]
        self.D, self.E = (5, 4) if most < 6 else (self.pick((5, 8, 16)), self.pick((4, 7)))
        few = (*batch, shared) if axes else ()
        fronts = [self.leading, few, few]
        if axes and any_front and self.chance(0.2):  # leading axes broadcast
            fronts[self.pick((1, 2))] = self.pick(((), (1,), (shared,), (*(1,) * len(batch), shared)))
        sides = ((self.T, self.D), (self.S, self.D), (self.S, self.E))
        for name, front, side in zip(("query", "key", "value"), fronts, sides, strict=True):
            self.real(name, (*front, *side), dtype=own)
        if self.chance(0.05):
            self.dtypes[self.pick(("query", "key", "value"))] = self.sums
        self.consecutive = True

    def draw_places(self):
        """Draw where queries and keys sit."""
        kind = self.pick({"none": 4, "int": 2, "rows": 1, "traced": 1, "token": 1})
        first = self.pick((self.S - self.T, 0, self.whole(-3, self.S)))
        if kind == "token":
            self.consecutive = False
            for name, length in (("query_positions", self.T), ("key_positions", self.S)):
                packed = f"np.arange({length}) % {self.whole(2, length + 1)}"
                mixed = f"@.permuted(np.tile(np.arange({length}), {self.rows(1)}), axis=-1)"
                self.options[name] = self.data(self.pick((packed, mixed)))
        elif kind == "rows" and self.leading:
            self.options["query_offset"] = self.data(f"@.integers(0, {self.S}, {self.batch})")
        elif kind != "none" or self.T != self.S:
            self.options["query_offset"] = self.data(f"np.int32({first})") if kind == "traced" else str(first)
            self.options |= {"key_offset": str(self.whole(-5, 5))} if self.chance(0.2) else {}

    def leaf(self, stored):
        """Draw one mask; `stored`, perhaps with arrays by row."""
        T, S, whole, rows, data = self.T, self.S, self.whole, self.rows, self.data
        texts = [
            "masks.causal()",
            f"masks.sliding_window({whole(0, S)}, {self.pick((0, 2, None))})",
            f"masks.chunked({whole(1, S)})",
            f"masks.dilated({whole(1, 4)})",
            f"masks.global_tokens({whole(0, 3)})",
            f"masks.prefix({whole(0, S)})",
            f"masks.streaming({whole(0, S // 4)}, {whole(0, 4)})",
            f"masks.block_diffusion({max(S // 2, 1)}, {whole(1, S // 4)})",
            f"masks.neighbourhood({self.pick(('(2, 3, 4), (1, 1, 2), 1', '(7, 7), 2', '(11, 11), 3, 2'))})",
            "masks.predicate(lambda query, key: (query + 2 * key) % 5 < 3)",
            "masks.predicate(lambda head, query, key: abs(query - key) <= 3 * head + 4)",
            "masks.predicate(lambda batch, head, query, key: (key + batch) % 3 != head % 3)",
            f"masks.tree({data(f'np.minimum(@.integers(-1, 4, {min(S, 9)}), np.arange({min(S, 9)}) - 1)')}, "
            f"{max(S - 9, 0)})",
        ]
        if not stored or self.chance(0.5):
            return self.pick(texts)
        sides, front = (whole(1, T), whole(1, S)), rows()
        grid = (-(-T // sides[0]), -(-S // sides[1]))
        full = tuple(self.pick((1, size)) for size in (*self.leading, T, S))
        ids, sorted_ids = (data(fmt.format(f"@.integers(0, 3, {rows(S)})")) for fmt in ("{}", "np.sort({})"))
        chosen = data(f"@.integers(-1, {grid[1] + 1}, {(*front, grid[0], 2)})")
        listed = (*self.pick((front, self.leading)), T, whole(1, 6))
        texts = [
            f"masks.segments({data(f'@.integers(0, 3, {rows(T)})')}, {ids})",
            f"masks.lengths({data(f'@.integers(0, {S + 1}, {rows()})')})",
            f"masks.prefix({data(f'@.integers(0, {S + 1}, {rows()})')})",
            f"masks.valid_keys({data(f'@.random({rows(S)}) < 0.7')})",
            f"masks.blocks({data(f'@.random({(*rows(), *grid)}) < 0.6')}, {sides})",
            f"masks.chosen_blocks({chosen}, {sides}, {grid[1]},"
            f" counts={data(f'@.integers(0, 3, {(*front, grid[0])})')})",
            f"masks.chosen_keys({data(f'@.integers(-1, {S}, {listed})')})",
            f"masks.from_array({data(f'@.random({full}) < 0.5')})",
            f"masks.from_drop({data(f'@.random({full}) < 0.5')})",
        ]
        if self.consecutive:
            texts += [f"masks.segments({ids})", f"masks.segments({sorted_ids})"]
            texts += [f"masks.shared_prefix({whole(0, 3)}, {ids})"]
        return self.pick(texts)

    def draw_mask(self, stored=True, share=0.8):
        mask = self.pick(("masks.causal()", self.leaf(stored)))
        for _ in range(self.pick((0, 0, 1, 1, 2))):
            more = self.leaf(stored)
            mask = (self.pick("&|"), mask, ("~", more) if self.chance(0.2) else more)
        return mask if self.chance(share) else None

    def draw_scores(self):
        H, pick, real = self.heads, self.pick, self.real
        own = pick(((), (1,), (H,)))
        metric = (H,) if self.leading and self.shapes["query"][-3] == H and self.chance(0.5) else ()
        table = real("table", (8, pick((1, H))))
        for part in pick({"": 5, "p": 3, "d": 2, "pd": 2, "dp": 1, "bp": 1, "r": 1}):
            point = [
                "softcap(1.5)",
                f"softcap({real('cap', own, POSITIVE)})",
                f"temperature({real('temperature', own, POSITIVE)})",
                "modifier({}score * (1 + 0.25 * head.astype(score.dtype)) + 0.5 * batch.astype(score.dtype))",
                "modifier({}score / (1 + 0.1 * score * score))",
            ]
            distance = [
                f"alibi({H})",
                f"alibi(slopes={real('slopes', (H,), f'0.1 * ({POSITIVE})')})",
                f"relative_bias({table}, bidirectional={self.chance(0.5)}, max_distance={pick((9, 40))})",
                "modifier({}score - 0.125 * abs(query - key).astype(score.dtype))",
                f"modifier({{}}score + {real('gain', ())}.astype(score.dtype)"
                " * (key % 3).astype(score.dtype))",
            ]
            removal = ["modifier({}where(abs(query - key) % 5 < 3, score, -inf))"]
            metrics = [f"bilinear({real('metric', (*metric, self.D, self.D))})"]
            text = pick({"p": point, "d": distance, "r": removal, "b": metrics}[part])
            self.score.append(f"scores.{text.format('lambda score, batch, head, query, key: ')}")

    def draw_rest(self, statistics=(), bias=True):
        """Draw bias, scale, sinks and what else is returned."""
        if bias and self.chance(0.3):
            shape = tuple(self.pick((1, size)) for size in (*self.leading, self.T, self.S))
            dtype = self.pick((self.sums, self.dtypes["query"]))
            self.options["bias"] = self.real("bias", shape, dtype=dtype)
            self.changes += ['bias[rng("gone").random(bias.shape) < 0.2] = -inf'] * self.chance(0.4)
        if self.chance(0.3):
            scale = self.pick((-0.3, 0.0, 0.3, 0.3))
            drawn = f"{scale} * ({POSITIVE})"
            self.options["scale"] = str(scale) if self.chance(0.5) else self.real("scale", (), drawn)
        if self.chance(0.25):
            shape = tuple(self.pick((1, size)) for size in self.leading[:-1]) + self.leading[-1:]
            self.options["sinks"] = self.real("sinks", shape)
        chosen = [name for name in statistics if self.chance(0.35)]
        self.extras["aux"] = repr(tuple(chosen))
        self.smooth += [name for name in chosen if name != "argmax" and self.chance(0.5)]

    def draw_dropout(self, rate):
        """Drop weights; which, the definition learns from equal weights of values that tell keys apart."""
        self.extras |= {"dropout_rate": str(rate), "rng": f"jax.random.key({self.whole(0, 9)})"}
        places = {name: text for name, text in self.options.items() if name.startswith(("query_", "key_"))}
        given = "".join(f", {name}={text}" for name, text in (self.extras | places).items() if name != "aux")
        arrays = f"jnp.zeros({(*self.leading, self.T, 1)}), jnp.zeros({(self.S, 1)}), jnp.eye({self.S})"
        self.prelude += [f"survivors = np.asarray(attend({arrays}, backend='dense'{given}) > 0)"]
        self.prelude += [f"assert abs(survivors.mean() - {1 - rate}) < 6 * ({rate} / survivors.size) ** 0.5"]
        self.facts["survivors"] = f"survivors / {1 - rate}"

    def draw_poison(self):
        """Plant NaN or inf, half of the time where nobody may attend."""
        names = [name for name in ("query", "key", "value", "bias", "slopes", "gain") if self._uses(name)]
        for _ in range(self.pick((1, 1, 2)) if self.poison and self.chance(0.3) else 0):
            name = self.pick(names)
            place = [str(self.whole(0, size - 1)) for size in self.shapes[name]]
            if name in ("query", "key") and self.chance(0.5):
                place[-1] = ":"
            self.changes.append(f"{name}[{', '.join(place) or '...'}] = {self.pick(('nan', 'nan', 'inf'))}")
            if name in ("key", "value") and self.chance(0.5) and self.consecutive:
                s = int(place[-2]) + int(self.options.get("key_offset", 0))
                hidden = ("~", f"masks.sliding_window(None, None) & masks.prefix({max(s + 1, 0)})")
                self.mask = hidden if self.mask is None else ("&", self.mask, hidden)

    def draw_transforms(self, derivatives=None, wraps=None):
        small = not self.long and self.T * self.S < 4000
        usual = {None: 5, "vjp": 9, "jvp": 2, "hvp": small and set(self.dtypes.values()) == {"float32"}}
        self.derivative = self.pick(derivatives or usual)
        self.wrap = self.pick(wraps or {None: 10, "checkpoint": 3, "vmap": 2, "vmap of all": 1, "scan": 2})
        if any("= nan" in change or "= inf" in change for change in self.changes):
            self.derivative = self.pick((None, "vjp")) if derivatives is None else self.derivative
            self.wrap = None
        if self.derivative == "jvp":
            self.smooth = [name for name in self.smooth if name in ("output", "lse", "entropy")]
        if self.wrap in ("vmap", "vmap of all", "scan"):
            every = [name for name in self.dtypes if name != "bias" and self._uses(name)]
            self.mapped = tuple(name for name in every if name in ("query", "key") or self.chance(0.4))
            for name in self.mapped:
                text = self.arrays[name]
                self.arrays[name] = f"np.stack([{text}, {text.replace(repr(name), repr(name + ' 2'))}])"

    def _uses(self, name):
        known = ("query", "key", "value", *self.options.values())
        return name in known or name in re.findall(r"\w+", "".join(self.score))

    # Families.

    def compose(self, *statistics, lengths=LENGTHS, places=True, stored=True, bias=True, dropout=False):
        """Draw what most families have: sizes, mask, scores and the rest."""
        if not self.shapes:
            self.sizes(lengths=lengths)
        if places:
            self.draw_places()
        elif "query_offset" not in self.facts:
            self.options["query_offset"] = str(self.pick((self.S - self.T, 0)))
        self.mask = self.draw_mask(stored)
        self.draw_scores()
        self.draw_rest(statistics, bias)
        if dropout and self.chance(0.1):
            self.draw_dropout(self.pick((0.1, 0.5)))
        elif bias:
            self.draw_poison()

    def _attend(self):
        self.compose(*STATISTICS, dropout=True)
        if {"weights", "scores"} & set(eval(self.extras["aux"])) and self.chance(0.4):
            self.extras["rows"] = str(sorted({self.whole(0, self.T - 1) for _ in range(3)}))
            self.extras |= {"heads": str([self.whole(0, self.heads - 1)])} if self.leading else {}
        backend = self.pick({None: 4, "'dense'": 1, "'tiled'": 2})
        self.extras |= {"backend": backend} if backend and self.family == "attend" else {}
        self.extras |= {"batch_invariant": "True"} if backend != "'dense'" and self.chance(0.06) else {}
        self.draw_transforms()

    def _small_tiles(self):
        self._attend()
        sides = [self.pick((2, 3, 16, 24)) if self.T * self.S < 9000 else 48 for _ in range(4)]
        more = self.pick(("", ", heads=2", ", blocks=2, pieces=2", ", at_once=8"))
        more = "" if "pieces" in more and 1 in (self.T, self.S) else more  # which nobody chooses
        self.setup["tiles"] = "Blocking({}, {}{more}), Blocking({}, {}{more})".format(*sides, more=more)

    def _merge(self):
        self.compose(lengths=LENGTHS[1:], places=False, stored=False)
        self.extras, self.smooth = {}, ["output", "lse"] if self.chance(0.5) else ["output"]
        bias = "bias[..., first:last]" if self.shapes.get("bias", (1,))[-1] > 1 else "bias"
        self.setup = {"cut": self.whole(1, self.S - 1), "length": self.S, "bias": bias}
        self.draw_transforms()

    def _cache(self):
        """Prefill rows of unequal lengths, then decode step by step."""
        self.sizes(axes=2, square=True, lengths=LENGTHS[1:3])
        own, heads, cut, self.T = self.dtypes["query"], self.shapes["key"][1], self.S, self.whole(1, 3)
        self.S = cut + self.T
        sides = {"query": (self.heads, self.T, self.D), "key": (heads, self.S, self.D)}
        for name, side in (sides | {"value": (heads, self.S, self.E)}).items():
            self.real(name, (2, *side), dtype=own)
        self.arrays["starts"] = f"rng('starts').integers(0, {cut + 1}, 2)"
        self.facts = {"query_offset": "starts", "mask": f"masks.lengths(starts + {self.T})"}
        self.compose("lse", "max_score", "entropy", places=False, stored=False, bias=False)
        window, pages = self.whole(0, 3), -(-self.S // 4)
        stored = self.pick((own, own, own if own == "float64" else "int8"))
        mask = f"masks.sliding_window({window})" if window else "masks.causal()"
        self.mask = mask if self.mask is None or self.chance(0.5) else ("&", mask, self.mask)
        room = f"window={window}, capacity={window + cut}" if window else f"capacity={self.S}"
        widths = f"2, {heads}, key_width={self.D}, value_width={self.E}, dtype='{stored}'"
        self.setup = {"cut": cut, "int8": stored == "int8", "cache": f"KVCache.create({widths}, {room})"}
        if not window and stored == own and self.chance(0.6):
            self.setup["cache"], room = "pages", f"num_pages={2 * pages}, page_size=4, pages_per_row={pages}"
            self.prelude = [f"pages = PagedKVCache.create({widths}, {room}).assign(1, np.arange({pages}))"]
            self.prelude += [f"pages = pages.assign(0, np.arange({pages}, {2 * pages}))"]
        self.draw_transforms({None: 1} if stored == "int8" else {None: 2, "vjp": 2}, {None: 1})

    def _linear(self):
        self.sizes(axes=self.pick((1, 2)), square=True, lengths=(1, 7, 19), most=2)
        self.batch, front = self.leading[:-1], (*self.leading[:-1], self.shapes["key"][-3])
        uniform, rows, delta = "rng({name!r}).random({shape})", (*front, self.S), self.chance(0.5)
        features = self.pick(("'identity'", "'relu'") if delta else ("'identity'", "'elu1'", "'exp'"))
        normalise = features in ("'elu1'", "'exp'") and self.chance(0.6)
        self.options = {"feature_map": features, "normalise": str(normalise), "causal": str(self.chance(0.8))}
        self.arrays["key"] = f"0.4 * {self.arrays['key']}"
        self.options |= {"rate": self.real("rate", rows, uniform)} if delta else {}
        if self.chance(0.6):
            self.options["decay"] = self.real("decay", (*rows, *self.pick(((), (self.D,)))), f"-{uniform}")
        if self.chance(0.4):
            state = [self.real("memory", (*front, self.D, self.E))]
            state += [self.real("key_sum", (*front, self.D), POSITIVE)] * normalise
            self.options["initial"] = f"linear.State({', '.join(state)})"
        if self.chance(0.3):
            self.options["valid"] = self.data(f"@.random({self.rows(self.S)}) < 0.8")
        self.extras, self.smooth = {"chunk": self.pick(("1", "4", "16", "None"))}, ["output"]
        self.smooth += ["memory"] * self.chance(0.5)
        self.draw_transforms({None: 2, "vjp": 3})

    def _read(self):
        self.compose(places=False)
        self.extras, self.smooth = {}, []
        if self.chance(0.5):
            self.options |= {"tokens": self.data(f"@.integers(0, 5, {self.S})"), "delimiters": "[2]"}
            self.options["query_tokens"] = self.data(f"@.integers(0, 5, {self.T})")
        for name in ("grid", "top_k", "first", "local"):
            self.options |= {name: str(self.whole(1, 5))} if self.chance(0.4) else {}
        self.draw_transforms({None: 1}, {None: 4, "vmap": 1})

    def _ring(self):
        self.compose("lse", "argmax", "entropy", lengths=LENGTHS[1:], dropout=True)
        divided = len(self.leading) == 2 and self.chance(0.5)
        sizes, names = ((2, 2), ("seq", "data")) if divided else ((4,), ("seq",))
        kinds = f"(jax.sharding.AxisType.Auto,) * {len(sizes)}"
        self.prelude += [f"mesh = jax.make_mesh({sizes}, {names}, axis_types={kinds})"]
        layout, batch = self.pick(("contiguous", "balanced")), ", batch_axis='data'" * divided
        self.setup["mesh"] = f", mesh=mesh, axis='seq', layout='{layout}'{batch}"
        self.draw_transforms({None: 1, "vjp": 3}, {None: 1})


def generate(seed, number, poison=True):
    """Return program `number` of a seed; without `poison`, one whose numbers are finite."""
    draft = Draft(seed, number, poison)
    return Program(**{name: getattr(draft, name) for name in Program.__dataclass_fields__})
