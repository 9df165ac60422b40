"""A vision transformer, trained on drawn shapes in seconds, and where its class token looks.

    python examples/vision_transformer.py

Images of 24 x 24 show a disc, a square, a cross or a ring in noise; patches of 4 x 4 are the tokens.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from regard.models import Classifier, TransformerConfig

KINDS, SIDE, PATCH = ("disc", "square", "cross", "ring"), 24, 4
SIZES = {"d_model": 48, "num_heads": 4, "d_ff": 96, "num_layers": 2, "input_width": PATCH**2}


def draw(rng, count):
    kinds, places = rng.integers(len(KINDS), size=count), rng.integers(5, SIDE - 5, size=(2, count, 1, 1))
    rows, columns = np.abs(np.indices((SIDE, SIDE))[:, None] - places)
    far = np.hypot(rows, columns)
    shapes = [far < 4.6, np.maximum(rows, columns) < 4, (np.minimum(rows, columns) < 1) & (far < 5)]
    drawn = np.select(
        [(kinds == kind)[:, None, None] for kind in range(3)], shapes, (far > 2.5) & (far < 4.6)
    )
    return cut(drawn + rng.normal(0, 0.3, drawn.shape)), kinds, cut(drawn).any(-1)


def cut(images):
    """Patches in reading order, `(batch, patches, pixels)`."""
    parts = images.reshape((-1, *(SIDE // PATCH, PATCH) * 2)).swapaxes(2, 3)
    return parts.reshape((len(images), -1, PATCH**2)).astype(np.float32)


@nnx.jit
def step(model, optimizer, patches, kinds):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(patches), kinds).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train() -> Classifier:
    config = TransformerConfig(
        **SIZES, class_token=True, positions="learned", max_length=1 + (SIDE // PATCH) ** 2
    )
    rng, model = np.random.default_rng(0), Classifier(config, len(KINDS), pooling="first", rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for number in range(201):
        value = step(model, optimizer, *draw(rng, 64)[:2])
        if number % 50 == 0:
            print(f"step {number:3}  loss {value:.3f}")
    return model


def main() -> None:
    model = train()
    patches, kinds, shown = draw(np.random.default_rng(1), 512)
    logits, seen = model(jnp.asarray(patches), aux=("weights",))
    right = (logits.argmax(-1) == kinds).mean()
    print(f"right on new images: {right:.0%}; {shown.mean():.0%} of patches show the shape")
    for layer, block in enumerate(seen["blocks"]):
        read = block["weights"][:, :, 0, 1:]  # what the class token reads, `(batch, heads, patches)`
        shares = (read * shown[:, None]).sum((0, 2)) / read.sum((0, 2))
        print(
            f"layer {layer}: share that each head reads there", ", ".join(f"{share:.0%}" for share in shares)
        )


if __name__ == "__main__":
    main()
