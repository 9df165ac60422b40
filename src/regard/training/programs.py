"""A training run as pure functions of seed and step: the first state, updates, evaluation."""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from regard.layers.expert_balance import is_choice_bias, split_loads
from regard.training import head_statistics
from regard.training.compilation import run_once
from regard.training.optimization import make_optimizer, make_schedule
from regard.training.sharding import Deployment
from regard.training.task import DROPOUT, INITIALISATION, TRAINING, Batch, Metrics, Task, make_stream


class State(NamedTuple):
    """Parameters, optimizer and the parameters' moving average if there is one: an update makes the next."""

    params: Any
    optimizer: optax.OptState
    average: Any = None

    @property
    def evaluated(self) -> Any:
        return self.params if self.average is None else self.average


@dataclass(frozen=True)
class Program:
    """The pure functions of a run, before compilation, and the shapes of its state; on one device by default.

    `start` makes the first state, on a mesh divided from the beginning; `update` turns state, index and what
    `make_feed` reads into the next state and metrics.
    """

    shapes: State
    start: Callable[[], State]
    update: Callable[..., tuple[State, Metrics]]
    evaluate: Callable[[Any, Batch], Metrics]
    measure_heads: Callable[[Any, Batch], head_statistics.HeadStats]
    deployment: Deployment | None = None

    def compile(self, function: Any, *arguments: Any, options: dict[str, Any] | None = None) -> Any:
        """Compile one of the functions for arguments like these; an update reuses its state's memory."""
        updates = function is self.update
        jitted: dict[str, Any] = {"donate_argnums": 0} if updates else {}
        if self.deployment is not None:
            whole = self.deployment.everywhere
            jitted["out_shardings"] = (self.deployment.divide_state(self.shapes), whole) if updates else whole
        with nullcontext() if self.deployment is None else self.deployment.within():
            return jax.jit(function, **jitted).lower(*arguments).compile(options)

    def place(self, batch: Any) -> Any:
        """Put a batch that every process has where the functions want it."""
        if self.deployment is None:
            return jax.tree.map(jnp.asarray, batch)
        return self.deployment.spread(batch)


def make_feed(task: Task, seed: int, deployment: Deployment | None = None) -> Callable[[int], Any]:
    """Return a function that reads on the host the rows of an update, those of this process's devices."""
    if not task.reads_rows:
        return lambda index: ()

    def feed(index: int) -> Any:
        with _on_host():
            rng = jax.random.fold_in(make_stream(seed, TRAINING), index)
            chosen = task.choose(rng, task.optimization.batch_size)
        return task.fetch(chosen) if deployment is None else deployment.feed(task.fetch, chosen)

    return feed


def _on_host() -> AbstractContextManager[Any]:
    """Return the context in which the CPU computes, where JAX has it: a device is not waited for."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return nullcontext()


def make_program(task: Task, seed: int, deployment: Deployment | None = None) -> Program:
    """Build the pure functions of a run; on a mesh the numbers are the same but for rounding."""
    optimization = task.optimization
    optimizer, schedule = make_optimizer(optimization), make_schedule(optimization)

    def build() -> nnx.Module:
        params, dropout = make_stream(seed, INITIALISATION), make_stream(seed, DROPOUT)
        return task.make_model(nnx.Rngs(params=params, dropout=dropout))

    # The model is split from its parameters once: jax.jit on plain arrays takes 5 ms a step, nnx.jit 9.
    shapes = nnx.eval_shape(build)
    shapes.eval()
    resting = nnx.graphdef(shapes)
    shapes.train()
    balance = {"counts_loads": True, "balance_loss": optimization.balance_loss}
    shapes.set_attributes(**balance, raise_if_not_found=False)
    narrow, promotion = _leave, nullcontext
    if optimization.precision == "bfloat16":
        narrow = partial(_cast, dtype=jnp.bfloat16)
        promotion = partial(jax.numpy_dtype_promotion, "standard")  # flax's norms need it
    active = nnx.graphdef(shapes)
    # Random streams, whose seeds do not matter: every step sets them.
    rest = run_once(lambda: nnx.split(build(), nnx.Param, ...)[2])

    def draw_state() -> State:
        params = nnx.split(build(), nnx.Param, ...)[1]
        return State(params, optimizer.init(params), params if optimization.ema_decay else None)

    state_shapes = jax.eval_shape(draw_state)
    places, divide, lend = None, _leave, _lend_whole
    if deployment is not None:
        places = deployment.divide_state(state_shapes)
        divide, lend = deployment.constrain, deployment.lend

    def compute_loss(params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        # Copied: random streams made outside this trace may not be reseeded inside it.
        used, blocks = lend(params, narrow)
        model = nnx.merge(active, used, jax.tree.map(jnp.asarray, rest))
        nnx.reseed(model, dropout=rng)
        before = _list_constants(model)
        with promotion(), blocks:
            measured = _cast(task.measure(model, narrow(batch)), jnp.float32)
        _demand_same(before, _list_constants(model))
        return measured

    differentiate = jax.value_and_grad(compute_loss, has_aux=True)

    def accumulate(params: Any, batch: Batch, rng: jax.Array) -> Any:
        """Differentiate parts of a batch one after the other; average all they give, by their weights."""
        count = optimization.accumulate_steps
        if count == 1:
            return differentiate(params, batch, rng)
        # Every count-th row is one part's: a device has its share of each.
        parts = jax.tree.map(lambda rows: rows.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1), batch)

        def weigh(part: Batch) -> Metrics:
            return {name: jnp.asarray(weight, jnp.float32) for name, weight in task.weigh(part).items()}

        shares = {name: each / each.sum() for name, each in jax.lax.map(weigh, parts).items()}

        def add(total: Any, part: tuple[Batch, jax.Array, Metrics]) -> tuple[Any, None]:
            rows, number, share = part
            (loss, measured), gradients = differentiate(params, divide(rows), jax.random.fold_in(rng, number))
            of_loss = share["loss"]
            measured = {name: metric * share.get(name, of_loss) for name, metric in measured.items()}
            terms = (loss * of_loss, measured), jax.tree.map(lambda slope: slope * of_loss, gradients)
            return jax.tree.map(operator.add, total, terms), None

        term_shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda rows: rows[0], parts), rng)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), term_shapes)
        return jax.lax.scan(add, zeros, (parts, jnp.arange(count), shares))[0]

    def update(state: State, index: jax.Array, fed: Any = ()) -> tuple[State, Metrics]:
        batch_rng = jax.random.fold_in(make_stream(seed, TRAINING), index)
        batch = divide(fed or task.make_batch(batch_rng, optimization.batch_size))
        rng = jax.random.fold_in(make_stream(seed, DROPOUT), index)
        (loss, measured), gradients = accumulate(state.params, batch, rng)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with floats, also under "strict"
            # Of the updates that were made: those that are skipped are not counted.
            rate = jnp.asarray(schedule(optax.tree.get_all_with_path(state.optimizer, "count")[-1][1]))
            change, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, change)
        average = state.average
        if average is not None:
            average = optax.incremental_update(params, average, 1 - optimization.ema_decay)
        slopes, surpluses = split_loads(gradients)
        following, norm = State(params, optimizer_state, average), optax.tree.norm(slopes)
        measured = {"loss": loss, **measured, "learning_rate": rate, "grad_norm": norm}
        if surpluses:  # The busiest expert of all layers, over the mean.
            measured["expert_load"] = 1 + jnp.concatenate(surpluses).max()
        if optimization.nan == "skip":
            is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            following = jax.tree.map(partial(jnp.where, is_finite), following, state)
            measured["skipped"] = 1 - is_finite.astype(jnp.float32)
        return following, {**measured, "parameter_norm": optax.tree.norm(following.params)}

    def at_rest(function: Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Any]:
        def call(params: Any, batch: Batch) -> Any:
            used, blocks = lend(params, _leave)
            with blocks:
                return function(nnx.merge(resting, used, rest), divide(batch))

        return call

    evaluate, measure_heads = at_rest(task.evaluate), at_rest(partial(head_statistics.measure_heads, task))
    start = partial(run_once, draw_state, places=places)
    return Program(state_shapes, start, update, evaluate, measure_heads, deployment)


def _list_constants(model: nnx.Module) -> dict[str, list[Any]]:
    """Return the arrays that are neither parameters nor random streams, by their names."""
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    return {".".join(map(str, path)): jax.tree.leaves(leaf) for path, leaf in nnx.to_flat_state(state)}


def _demand_same(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> None:
    """Raise where a model's call has changed what no run keeps, such as running averages of a norm."""
    moved = [name for name in before if any(map(operator.is_not, before[name], after[name]))]
    if moved:
        raise ValueError(
            f"model: expected one whose calls leave all as it was, got {', '.join(moved)}, which change and"
            " which no run keeps; take layers without running averages, such as nnx.LayerNorm"
        )


def _cast(tree: Any, dtype: Any) -> Any:
    """Cast arrays to a dtype, but for the biases whose small steps choose experts."""

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        floats = jnp.issubdtype(leaf.dtype, jnp.floating) and not is_choice_bias(path)
        return leaf.astype(dtype) if floats else leaf

    return jax.tree_util.tree_map_with_path(cast, tree)


def _lend_whole(params: Any, cast: Callable[[Any], Any]) -> tuple[Any, AbstractContextManager[None]]:
    return cast(params), nullcontext()


def _leave(tree: Any) -> Any:
    return tree
