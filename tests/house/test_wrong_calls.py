"""What newcomers write in every room: each is told which argument it is, and never by Python or JAX."""

import jax
import jax.numpy as jnp
import pytest

from regard import KVCache, attend, inspection, masks, parallel, scores
from regard.inspection import figures
from regard.interop import equinox, flax, huggingface, onnx_ops, weight_files
from regard.models import sampling
from regard.theory import gibbs, hopfield
from regard.training import history, load_model, load_run, open_run, tasks, train
from regard.training.mesh_specs import read_mesh

SQUARE, ROWS, TRACE, COPY = jnp.eye(3), [jnp.eye(3)[:, None]] * 3, inspection.Trace(), tasks.Copy()
LAYER = equinox.MultiheadAttention(1, 3, key=jax.random.key(0))
TAKE_NO_NONE = [
    *(TRACE.save, TRACE.explore, inspection.load, inspection.roll_out, inspection.record, inspection.Tokens),
    *(figures.head_map, figures.entropy_profile, huggingface.load, huggingface.read_config, read_mesh),
    *(weight_files.open_weights, load_run, history.training_document, tasks.find_task, tasks.load_tasks),
    lambda path: figures.save(None, path),
    lambda path: weight_files.write_weights(path, {}),
    lambda path: open_run(path, COPY),
    lambda path: open_run("x", COPY, resume=path),
    lambda path: load_model(COPY, path),
    lambda path: huggingface.save(None, path, kind="gpt2"),
    lambda path: tasks.Text(files=(path,)).tokens,
]
WRONG_CALLS = [
    lambda: inspection.roll_out(TRACE), lambda: inspection.roll_out_row(None, 0),
    lambda: inspection.record_repeats(abs, 3, rng="3"), lambda: TRACE.explore("x", compare=3),
    lambda: TRACE.explore("x", max_mb="3"), lambda: inspection.weigh_values(None, SQUARE, SQUARE),
    lambda: figures.head_atlas([None]), lambda: scores.alibi(4) | scores.softcap(5),
    lambda: 3 + scores.softcap(5), lambda: sampling.row_keys(jax.random.key(0), -1),
    lambda: masks.causal().prepare(8, leading=2),
    lambda: attend(SQUARE, SQUARE, SQUARE, mask=masks.chosen_keys([[0]])),
    lambda: gibbs.temperature_sweep(SQUARE, "abc"), lambda: gibbs.temperature_sweep(SQUARE, [0.0]),
    lambda: gibbs.equilibrium(SQUARE, float("nan")), lambda: hopfield.update(SQUARE, SQUARE, -1),
    lambda: tasks.Text(files="x").tokens, lambda: open_run("x", None),
    lambda: open_run("x", COPY, seed="0"), lambda: load_model(None, "x"),
    lambda: train(open_run("x", COPY), profile=-1), lambda: parallel.build_mesh("data=8"),
    lambda: onnx_ops.run_node(None, {}), lambda: onnx_ops.attention(None, SQUARE, SQUARE),
    lambda: KVCache.create(batch=1, key_heads=1, key_width=2, capacity=2, dtype=None),
    lambda: flax.attention_fn(*ROWS, promote_dtype=lambda *_, dtype: 3), lambda: LAYER(SQUARE, SQUARE, None),
    lambda: flax.attention_fn(None, *ROWS[1:]), lambda: LAYER(*ROWS),
    lambda: LAYER(*[SQUARE] * 3, process_heads=3), lambda: LAYER(*[SQUARE] * 3, process_heads=zip),
]  # fmt: skip


@pytest.mark.parametrize("call", [*WRONG_CALLS, *(lambda call=call: call(None) for call in TAKE_NO_NONE)])
def test_a_wrong_call_is_told_by_the_name_of_its_argument(call):
    with pytest.raises((TypeError, ValueError), match=r"^[\w\[\]]+: expected "):
        call()
