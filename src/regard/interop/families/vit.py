"""ViT: images, cut into patches that an encoder reads as a sequence."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from regard.arguments import whole_number
from regard.axes import Array, Float
from regard.interop.families.family import SIZES, Family
from regard.interop.weight_maps import Conversion, Pair, Settings, Shape, WeightMap, linear, norm, squeeze
from regard.models import Encoder
from regard.models.presets import VIT

_LAYER, _BLOCK = "encoder.layer.{n}", "stack.blocks.{n}"


def _patch_shape(shape: Shape, settings: Settings) -> Shape:
    return (shape[-1], settings["num_channels"], *_sides("patch_size", settings["patch_size"]))


def _store_patches(parameters: Sequence[np.ndarray], settings: Settings) -> np.ndarray:
    width, channels, *patch = _patch_shape(parameters[0].shape, settings)
    return parameters[0].reshape(*patch, channels, width).transpose(3, 2, 0, 1)


# A convolution whose stride is its size, (M, C, height, width), is a kernel (height * width * C, M).
_PATCHES = Conversion(
    lambda tensor: tensor.transpose(2, 3, 1, 0).reshape(-1, tensor.shape[0]), _store_patches, _patch_shape
)


class ViT(Family):
    """ViT as an Encoder of vectors."""

    kind = "vit"
    architecture = "ViTModel"
    model = Encoder
    sizes: ClassVar = SIZES
    entries: ClassVar = {
        "layer_norm_eps": "norm_epsilon", "hidden_act": "activation", "qkv_bias": "attention_bias",
    }  # fmt: skip
    defaults: ClassVar = {**VIT, "output_bias": True}
    harmless: ClassVar = (
        "encoder_stride", "pooler_act", "pooler_output_size", "tie_word_embeddings", "is_encoder_decoder",
    )  # fmt: skip
    assumed: ClassVar = {"image_size": 224, "patch_size": 16, "num_channels": 3}
    weights = WeightMap(
        pairs=(
            Pair("embeddings.cls_token", "embedding.class_token", squeeze(2)),
            Pair("embeddings.position_embeddings", "embedding.position_table.embedding", squeeze(1)),
            Pair("embeddings.patch_embeddings.projection.weight", "embedding.entry.linear.kernel", _PATCHES),
            Pair("embeddings.patch_embeddings.projection.bias", "embedding.entry.linear.bias"),
            *linear(f"{_LAYER}.attention.attention.query", f"{_BLOCK}.attention.query_projection"),
            *linear(f"{_LAYER}.attention.attention.key", f"{_BLOCK}.attention.key_projection"),
            *linear(f"{_LAYER}.attention.attention.value", f"{_BLOCK}.attention.value_projection"),
            *linear(f"{_LAYER}.attention.output.dense", f"{_BLOCK}.attention.output_projection"),
            *norm(f"{_LAYER}.layernorm_before", f"{_BLOCK}.attention_residual.norm"),
            *linear(f"{_LAYER}.intermediate.dense", f"{_BLOCK}.feed_forward.widen"),
            *linear(f"{_LAYER}.output.dense", f"{_BLOCK}.feed_forward.narrow"),
            *norm(f"{_LAYER}.layernorm_after", f"{_BLOCK}.feed_forward_residual.norm"),
            *norm("layernorm", "stack.final_norm"),
        ),
        prefix="vit.",
        ignored=(r"(pooler|classifier|decoder)\..*", r"embeddings\.mask_token"),
    )

    def read_more(self, settings: Settings, fields: Mapping[str, Any], length: int | None) -> dict[str, Any]:
        sizes = {name: settings.get(name, value) for name, value in self.assumed.items()}
        patch, image = _sides("patch_size", sizes["patch_size"]), _sides("image_size", sizes["image_size"])
        places = (image[0] // patch[0]) * (image[1] // patch[1]) + 1
        return {"input_width": patch[0] * patch[1] * sizes["num_channels"], "max_length": places}


def _sides(name: str, size: Any) -> tuple[int, int]:
    """Return height and width, which config files give as one number where they agree."""
    sides = [*size] if isinstance(size, (list, tuple)) else [size, size]
    if len(sides) != 2:
        raise ValueError(f"{name}: expected one number, or height and width; got {size!r}")
    return whole_number(name, sides[0], 1), whole_number(name, sides[1], 1)


def cut_patches(
    images: Float[Array, "*B height width channels"], settings: Mapping[str, Any] | int
) -> Float[Array, "*B T W"]:
    """Cut images into the patches that a vision Transformer reads, row by row.

    Args:
        images: with the channels last, normalised as `preprocessor_config.json` says: ViT's are 2 x - 1 of x
            in [0, 1].
        settings: the model's config.json (`Pretrained.settings`), or the side of a patch.

    Returns:
        One vector per patch, `(*B, T, patch * patch * channels)`, with features by height, width and channel.

    Raises:
        ValueError: images that patches do not fill, or not of the model's size.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop import huggingface
        >>> huggingface.cut_patches(jnp.zeros((2, 8, 12, 3)), 4).shape
        (2, 6, 48)

    Reference: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, section 3.1.
    """
    images = jnp.asarray(images)
    sizes = {**ViT.assumed, **settings} if isinstance(settings, Mapping) else {"patch_size": settings}
    high, wide = _sides("patch_size", sizes["patch_size"])
    if images.ndim < 3:
        raise ValueError(f"images: expected (*B, height, width, channels), got shape {images.shape}")
    *batch, height, width, channels = images.shape
    if "image_size" in sizes:
        expected = (*_sides("image_size", sizes["image_size"]), sizes["num_channels"])
        if (height, width, channels) != expected:
            raise ValueError(
                f"images: expected height, width and channels {expected}, got {(height, width, channels)};"
                " resize them, and keep the channels last"
            )
    if height % high or width % wide:
        raise ValueError(
            f"images: expected sides that are multiples of {high} and {wide}, got {height}, {width}"
        )
    rows, columns = height // high, width // wide
    cut = images.reshape((*batch, rows, high, columns, wide, channels)).swapaxes(-4, -3)
    return cut.reshape((*batch, rows * columns, high * wide * channels))
