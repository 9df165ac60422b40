"""Arrays whose types say how they are divided, for what is not `attend` itself."""

from mesh_cases import on_eight_devices

SETTING = """
from jax.sharding import AxisType, NamedSharding
from oracle import assert_close
from regard import attend, linear, readouts

mesh = jax.make_mesh((2, 4), ("rows", "others"), axis_types=(AxisType.Explicit,) * 2)
spread = lambda array, spec: jax.device_put(array, NamedSharding(mesh, jax.P(*spec)))
x, key = draw((2, 4, 16, 3), (2, 4, 16, 3))
DIVISIONS = ("rows",), (None, "others"), ("rows", None, "others"), (None, None, "others")
"""

LINEAR = """
documents = np.repeat([[0, 1, 2, 1]], [3, 4, 7, 2], axis=1).repeat(2, 0).astype(np.int32)
decay = -jnp.abs(x[..., 0])

def call(query, key, decay, documents, **options):
    more = {"segments": documents} if options.get("causal", True) else {}
    output, state = linear.attend(query, key, query, decay=decay, **more, **options, return_state=True)
    return output, state.memory

for options in ({"rate": 0.5 * jnp.ones((2, 4, 16))}, {"causal": False}):
    expected = call(x, key, decay, documents, **options)
    loss = lambda *arrays: sum(jnp.sum(part**2) for part in call(*arrays, **options))
    slopes = jax.jit(jax.grad(loss, (0, 1)))(x, key, decay, documents)
    for spec in DIVISIONS:
        arrays = spread(x, spec), spread(key, spec), spread(decay, spec)
        arrays += (spread(documents, (spec[0], *spec[2:])),)
        got = call(*arrays, **options)
        assert jax.typeof(got[0]).sharding.spec[: len(spec)] == spec
        assert_close(got, expected)
        if spec[0]:
            assert_close(jax.jit(jax.grad(loss, (0, 1)))(*arrays), slopes, 2e-4)
        with parallel.use(mesh, "others"):
            assert_close(call(*arrays, **options), expected)
alone = linear.step(None, x[:, :, 0], key[:, :, 0], x[:, :, 0])[0]
divided = spread(x[:, :, 0], (None, "others"))
assert_close(linear.step(None, divided, spread(key[:, :, 0], (None, "others")), divided)[0], alone)
assert_close(linear.attend(spread(x, ("rows",)), key, x), linear.attend(x, key, x))
"""

OTHERS = """
lse = attend(x, key, x, aux=("lse",))[1]["lse"]
chosen = {"rows": [1, 2], "columns": slice(3)}
for spec in DIVISIONS:
    arrays = spread(x, spec), spread(key, spec)
    with parallel.use(mesh, "others"):
        assert_close(attend(*arrays, arrays[0], mask=masks.causal()), attend(x, key, x, mask=masks.causal()))
    for heads in (None, [0]):
        divided = readouts.window(*arrays, spread(lse, spec), **chosen, heads=heads)
        assert_close(divided, readouts.window(x, key, lse, **chosen, heads=heads))
    for devices in (4, 3):  # chunks that are full, and short ones
        order = parallel.to_zigzag(arrays[0], devices)
        np.testing.assert_array_equal(order, parallel.to_zigzag(x, devices))
        np.testing.assert_array_equal(parallel.from_zigzag(order, devices), x)
# Values without features are nothing to send around a ring.
whole = parallel.attend(x, x, x[..., :0], mesh=make_mesh(sequence=8), axis="sequence")
assert_close(whole, attend(x, x, x[..., :0]))
"""


def test_linear_attention_of_divided_rows_heads_and_tokens():
    on_eight_devices(SETTING + LINEAR)


def test_calls_under_a_mesh_windows_of_weights_and_zigzag_order():
    on_eight_devices(SETTING + OTHERS)
