"""Placements: a mesh with the purpose of its axes, and the plan that a call gets on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from regard.axes import Array
from regard.engine.call.canonicalization import canonicalize, float_array
from regard.engine.call.problem import Problem
from regard.engine.dispatch.explicit_axes import run_in_automatic_axes
from regard.engine.dispatch.placement import ExpertAxes
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.masks.grid import Grid
from regard.masks.offsets import positions_of
from regard.masks.spans import Span
from regard.parallel.cost_reports import CostReport, sent_bytes
from regard.parallel.division import LAYOUTS, Axes, Division
from regard.parallel.schedule import count_tiles, plan_rounds
from regard.parallel.shard_mapping import describe_whole, manual_axes, run, run_part
from regard.parallel.work import Work, favours_balance
from regard.scores.score import compose, split_product

PLANS = ("ring", "all_to_all", "both", "whole")
STATISTICS = ("lse", "max_score", "argmax", "entropy")  # of aux, those that travelling keys leave behind


@dataclass(frozen=True)
class Plan:
    name: str
    reason: str
    refusals: dict[str, str]
    division: Division


@dataclass(frozen=True)
class MeshPlacement:
    """A mesh with the purpose of its axes; hashable."""

    mesh: Any
    axes: Axes  # the sequence lies along them: one, or two for keys that travel and heads that are exchanged
    batch: Axes
    heads: Axes
    layout: str | None
    plan: str | None
    explicit: Any = None  # the mesh as it was given, if its axes are part of arrays' types
    experts: Axes = ()  # which may be among those of the batch

    @classmethod
    def check(
        cls,
        mesh: Any,
        axis: Any,
        batch_axis: Any = None,
        head_axis: Any = None,
        layout: Any = None,
        plan: Any = None,
        expert_axis: Any = None,
    ) -> MeshPlacement:
        shape = getattr(mesh, "shape", None)
        if not hasattr(mesh, "axis_names") or shape is None:
            raise TypeError(
                f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}; see jax.make_mesh"
            )
        named = {"axis": axis, "batch_axis": batch_axis, "head_axis": head_axis, "expert_axis": expert_axis}
        named = {
            name: tuple(names) if isinstance(names, list | tuple) else () if names is None else (names,)
            for name, names in named.items()
        }
        axes, batch, heads, experts = named.values()
        axis_names = ", ".join(map(repr, mesh.axis_names))
        for name, names in named.items():
            for axis_name in names:
                if axis_name not in mesh.axis_names:
                    raise ValueError(f"{name}: expected an axis of the mesh, {axis_names}; got {axis_name!r}")
        if len(axes) not in (1, 2):
            raise ValueError(
                f"axis: expected one name, or two: of keys that travel and of heads; got {axis!r}"
            )
        if len(experts) > 1:
            raise ValueError(f"expert_axis: expected one name or None, got {expert_axis!r}")
        every = (*axes, *batch, *heads, *(name for name in experts if name not in batch))
        if len(set(every)) < len(every):
            raise ValueError(f"axis, batch_axis, head_axis: expected different axes of the mesh, got {named}")
        explicit = None
        if AxisType.Explicit in mesh.axis_types:
            # No array lies on an abstract mesh, whose axes newer versions of JAX make explicit by default.
            explicit = mesh if isinstance(mesh, Mesh) else None
            mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        for name, chosen, choices in (("layout", layout, LAYOUTS), ("plan", plan, PLANS)):
            if chosen not in (None, *choices):
                listed = ", ".join(choices)
                raise ValueError(f"{name}: expected one of {listed}, or None to choose; got {chosen!r}")
        if plan in ("ring", "all_to_all") and len(axes) == 2:
            raise ValueError(f"axis: expected one name for plan {plan!r}, got {axes}")
        if plan == "both" and len(axes) == 1:
            raise ValueError(
                f"axis: expected two names for plan 'both', of keys that travel and of heads; got {axes}"
            )
        return cls(mesh, axes, batch, heads, layout, plan, explicit, experts)

    def attend(self, query: Any, key: Any, value: Any, options: Any) -> Any:
        """Attend as planned; inside `jax.shard_map` the arrays, a bias too, are this device's part."""
        if not self._is_inside():
            problem = canonicalize(query, key, value, **options)
            with jax.transfer_guard_host_to_device("allow"):  # as `regard.attend` does
                output, extra = self._run_whole(problem)
            return (output, {name: extra[name] for name in problem.aux}) if problem.aux else output
        metric, score = split_product(compose(options.get("score")))
        query = query if metric is None else metric.transform(query)
        arrays = {"query": query, "key": key, "value": value, "bias": options.get("bias")}
        output, extra = self._run_part(arrays, {**options, "score": score})
        return (output, extra) if extra else output

    def attend_here(self, query: Any, key: Any, value: Any, options: Any) -> Any:
        for name in ("query_positions", "key_positions"):
            _refuse_positions(name, options.get(name) is not None)
        return self.attend(query, key, value, options)

    def run(self, problem: Problem) -> tuple[Array, dict[str, Array]]:
        if not self._is_inside():
            return self._run_whole(problem)
        options = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}
        for side in ("query", "key"):
            is_placed = not positions_of(options[f"{side}_offset"]).is_consecutive
            _refuse_positions(f"{side}_positions", is_placed)
        if problem.mask is not None:
            options["mask"] = problem.mask.number_leading(None)  # its heads were those of this device
        arrays = {name: options.pop(name) for name in ("query", "key", "value")} | {"bias": problem.bias}
        return self._run_part(arrays, options)

    def divide_tokens(self, shape: tuple[int, int, int]) -> tuple[int, int, Callable[[Array], Array]]:
        """Return the parts of rows and positions of `(B, T, M)`, and what places arrays that have these."""
        if manual_axes() or self.explicit is not None:
            return 1, 1, lambda array: array
        along = self._divide_shape(shape)
        sharding = NamedSharding(self.mesh, PartitionSpec(tuple(itertools.chain(*along))))
        rows, positions = map(self._size, along)
        return rows, positions, lambda array: jax.lax.with_sharding_constraint(array, sharding)

    def divide_experts(self, shape: tuple[int, int, int], count: int, width: int) -> ExpertAxes | None:
        """Return the axes of the mesh that divide experts, and what goes on beside it in their layer."""
        shards = self._size(self.experts)
        if shards == 1 or count % shards or manual_axes() or self.explicit is not None:
            return None
        tokens = tuple(itertools.chain(*self._divide_shape(shape)))
        heads = self._size(self.heads)
        widths = self.heads if heads > 1 and width % heads == 0 else ()
        return ExpertAxes(self.mesh, tokens, self.experts, widths)

    def divide_lines(self, batch: tuple[int, ...], length: int = 1) -> tuple[Any, tuple[Axes, ...]]:
        """Return the mesh on which each device runs rows, heads and positions `(*B, K, T)` of its own, and
        the axes of it that divide each of these; None and no axes where it does not."""
        among = [self.batch, *[()] * (len(batch) - 2), self.heads][-len(batch) :]
        shared = zip((*among, self.axes), (*batch, length), strict=True)
        along = [axes if self._size(axes) > 1 and n % self._size(axes) == 0 else () for axes, n in shared]
        if not any(along) or manual_axes() or self._is_typed:
            return None, ()
        return self.mesh, tuple(along)

    def divided_here(self) -> Axes:
        """Return the axes over which `jax.shard_map` around the call divides the sequence; none outside."""
        return self.axes if self._is_inside() else ()

    def _divide_shape(self, shape: tuple[int, int, int]) -> list[Axes]:
        """Return the axes that divide rows, and those that divide positions."""
        divided = zip((self.batch, self.axes), shape, strict=False)
        return [axes if size % self._size(axes) == 0 else () for axes, size in divided]

    @property
    def _is_typed(self) -> bool:
        """Return whether arrays' types say how they are divided, and no context has set that aside."""
        context = jax.sharding.get_abstract_mesh()
        return self.explicit is not None and (context.empty or AxisType.Explicit in context.axis_types)

    def _is_inside(self) -> bool:
        """Return whether the code around the call is that of one device."""
        manual, every = manual_axes(), {*self.axes, *self.batch, *self.heads}
        if not manual & set(self.axes):
            return False
        if not every <= manual:
            missing = ", ".join(sorted(map(repr, every - manual)))
            raise ValueError(
                "axis, batch_axis, head_axis: expected axes of the jax.shard_map around the call; it leaves"
                f" {missing} to the compiler"
            )
        return True

    def _run_part(self, arrays: Any, options: Any) -> tuple[Array, dict[str, Array]]:
        parts: dict[str, Any] = {
            name: None if array is None else float_array(name, array, 0 if name == "bias" else 2)
            for name, array in arrays.items()
        }
        whole = describe_whole(parts, self.mesh, self.axes, self.batch, self.heads)
        try:
            problem = canonicalize(**{**options, **whole})
        except ValueError as error:
            queries, keys = whole["query"].shape[-2], whole["key"].shape[-2]
            error.add_note(
                "Inside jax.shard_map all but query, key, value and bias is of the whole sequence:"
                f" {queries} queries and {keys} keys."
            )
            raise
        plan = self.choose(problem)
        if plan.name == "whole":
            why = "; ".join(f"{name}: {refusal}" for name, refusal in plan.refusals.items()) or plan.reason
            raise NotImplementedError(f"plan: inside jax.shard_map there is no whole program; {why}")
        division = plan.division
        if not division.is_even:
            rows = [parts[name].shape[-2] for name in ("query", "key")]
            raise ValueError(
                f"layout: expected an even number of rows per device for {self.layout!r}; got {rows[0]} of"
                f" query and {rows[1]} of key"
            )
        return run_part(problem, division, parts, self.axes)

    def _run_whole(self, problem: Problem) -> tuple[Array, dict[str, Array]]:
        plan = self.choose(problem)
        if plan.name == "whole":
            return run_in_automatic_axes(BACKENDS[choose(problem).name].run, problem)
        if not self._is_typed:
            return run(problem, plan.division)
        # Where arrays' types say how they are divided, that is left to shard_map in between.
        spec = plan.division.result(problem.leading)
        output = NamedSharding(self.explicit, spec)
        extra = dict.fromkeys(problem.aux, NamedSharding(self.explicit, PartitionSpec(*spec[:-1])))
        divided = partial(run, division=plan.division)
        within: Any = jax.sharding.auto_axes(divided, out_sharding=(output, extra))
        return within(problem)

    def explain(self, problem: Problem) -> CostReport:
        plan = self.choose(problem)
        division = plan.division
        queries, keys = division.queries, division.keys
        whole = plan.name == "whole"
        tiles, counted = ((), "") if whole else count_tiles(problem, division)
        forward, backward = (0, 0) if whole else sent_bytes(problem, division)
        return CostReport(
            plan=plan.name,
            reason=plan.reason,
            refusals=plan.refusals,
            devices=division.size(*self.axes),
            layout=division.layout,
            rows_per_device=queries.padded // division.size(*self.axes),
            padding=(0, 0) if whole else (queries.padded - queries.length, keys.padded - keys.length),
            rounds=len(division.rounds),
            skipped_rounds=0 if whole else queries.ring - len(division.rounds),
            forward_bytes=forward,
            backward_bytes=backward,
            tiles=tiles,
            counted=counted,
        )

    def choose(self, problem: Problem) -> Plan:
        """Choose the plan asked for, or the one that sends least; an error carries the refusal."""
        names = ("both",) if len(self.axes) == 2 else ("ring", "all_to_all")
        refusals = {name: refusal for name in names if (refusal := self._refuses(problem, name))}

        def whole(reason: str, refusals: dict[str, str]) -> Plan:
            return Plan("whole", reason, refusals, self._divide(problem, names[0], "contiguous"))

        if self.plan == "whole":
            return whole("it was asked for", {})
        if self.plan is not None:
            if self.plan in refusals:
                raise NotImplementedError(f"plan {self.plan!r} cannot serve this call: {refusals[self.plan]}")
            return Plan(self.plan, "it was asked for", {}, self._lay_out(problem, self.plan))
        serving = [name for name in names if name not in refusals]
        if not serving:
            if self.layout == "zigzag":
                listed = "\n".join(f"  {name}: {refusal}" for name, refusal in refusals.items())
                raise NotImplementedError(f"no plan can serve this call in zig-zag order:\n{listed}")
            return whole("the compiler divides one program", refusals)
        if min(problem.T, problem.S) < self._size(self.axes) and self.layout != "zigzag":
            return whole("there are fewer rows than devices", refusals)
        divisions = {name: self._lay_out(problem, name) for name in serving}
        costs = {name: sum(sent_bytes(problem, division)) for name, division in divisions.items()}
        ordered = sorted(serving, key=lambda name: costs[name])
        reason = "it is the one that serves"
        if len(serving) > 1:
            listed = " against ".join(f"{costs[name] / 1e6:.3g} MB by {name}" for name in ordered)
            reason = f"it sends least, {listed}"
        return Plan(ordered[0], reason, refusals, divisions[ordered[0]])

    def _refuses(self, problem: Problem, name: str) -> str | None:
        if unknown := set(problem.aux) - set(STATISTICS):
            return f"of aux it knows {', '.join(STATISTICS)}, not {', '.join(sorted(unknown))}"
        if 0 in (*problem.leading, problem.T, problem.S, problem.E):
            return "there is nothing to divide"
        if refusal := self._refuses_leading(problem, name):
            return refusal
        if self.layout == "zigzag" and name == "all_to_all":
            return "zig-zag order is that of a ring"
        return _refuses_mask(problem)

    def _refuses_leading(self, problem: Problem, name: str) -> str | None:
        batch, heads = self._size(self.batch), self._size(self.heads)
        first = problem.leading[0] if len(problem.leading) > 1 else 1
        if first % batch:
            along = ", ".join(self.batch)
            return f"the batch, {first}, is not a multiple of the {batch} devices along {along}"
        arrays = {"query": problem.query, "key": problem.key, "value": problem.value}
        counts = {name: array.shape[-3] if array.ndim > 2 else 1 for name, array in arrays.items()}
        spelled = ", ".join(f"{count} of {array}" for array, count in counts.items())
        if any(count % heads and count > 1 for count in counts.values()):
            return f"heads ({spelled}) are not multiples of the {heads} devices along {', '.join(self.heads)}"
        if name == "ring":
            return None
        # A head that all share would have to be sent whole to everyone.
        shared = math.gcd(*(count // heads if count > 1 else 1 for count in counts.values()))
        devices = self._size(self.axes[-1:])
        if shared % devices:
            sizes = [size for size in range(1, shared + 1) if shared % size == 0]
            return (
                f"heads ({spelled}) are not multiples of the {devices} devices along {self.axes[-1]!r}; sizes"
                f" that divide them: {', '.join(map(str, sizes))}"
            )
        return None

    def _lay_out(self, problem: Problem, name: str) -> Division:
        """Find the rounds, with the layout asked for, or balanced where that evens out enough work."""
        if self.layout is not None or name == "all_to_all":
            return self._divide(problem, name, self.layout or "contiguous")
        plain, even = self._divide(problem, name, "contiguous"), self._divide(problem, name, "balanced")
        return even if favours_balance(problem, Work.count(problem), plain, even) else plain

    def _divide(self, problem: Problem, name: str, layout: str) -> Division:
        ring, exchange = {
            "ring": (self.axes[0], None), "all_to_all": (None, self.axes[0]), "both": self.axes
        }[name]  # fmt: skip
        division = Division(self.mesh, ring, exchange, self.batch, self.heads, layout, problem.T, problem.S)
        if 0 in (*problem.leading, problem.T, problem.S, problem.E):
            return division
        return dataclasses.replace(division, rounds=plan_rounds(problem, division))

    def _size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def _refuse_positions(name: str, is_given: bool) -> None:
    if is_given:
        raise NotImplementedError(
            f"{name}: expected none under `parallel.use` inside jax.shard_map, where layers have those of"
            " this device's rows; `parallel.attend` takes the positions of all rows"
        )


def _refuses_mask(problem: Problem) -> str | None:
    mask = problem.mask
    if mask is None:
        return None
    run = Span(0, 1)
    grid = Grid.tile(run, run, 0, len(problem.leading))
    try:
        jax.eval_shape(lambda: jax.tree.leaves(mask.slice_grid(grid)))
    except NotImplementedError as error:
        return str(error)
    return None
