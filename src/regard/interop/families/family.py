"""The interface of a family of pretrained models: config.json in both directions, and names of tensors."""

from collections.abc import Mapping
from typing import Any, ClassVar

from regard.interop.families.entries import HARMLESS, IGNORED, Entries, read_flag, read_size, refuse_unread
from regard.interop.weight_files import WeightFiles
from regard.interop.weight_maps import Fields, Settings, WeightMap
from regard.layers.choices import check_choice
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig

Model = Encoder | Decoder | EncoderDecoder
ACTIVATIONS = {
    "gelu": "gelu_erf", "gelu_python": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_quick", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
WRITTEN_ACTIVATIONS = {
    "gelu_erf": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_quick": "quick_gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip

# What most families call the sizes.
SIZES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
}
TOKENS = {"vocab_size": "vocab_size", "max_position_embeddings": "max_length"}


class Family:
    """A family of models of transformers.

    Subclass it in a file of its own and list it in `families/__init__.py`; `huggingface.load` and
    `huggingface.save` do the rest. What follows from more than one entry of config.json is read by
    `read_more` and written by `write_more`.
    """

    kind: ClassVar[str]  # `model_type` of config.json
    architecture: ClassVar[str]  # the class of transformers that saved models name
    model: ClassVar[type[Model]] = Decoder
    # Fields of TransformerConfig by the entries that say them: integers that must be there, and others, which
    # may be left out, but for those in `entries.IGNORED`.
    sizes: ClassVar[Mapping[str, str]] = {**SIZES, **TOKENS}
    entries: ClassVar[Mapping[str, str]] = {}
    # Entries that are numbers of layers, or of experts with tensors of their own.
    layer_counts: ClassVar[tuple[str, ...]] = ("num_hidden_layers",)
    defaults: ClassVar[Mapping[str, Any]] = {}  # fields of the whole family, and of entries that are left out
    required: ClassVar[Mapping[str, Any]] = {}  # entries of which one value is supported
    harmless: ClassVar[tuple[str, ...]] = ()  # entries that change no number, beside `entries.HARMLESS`
    assumed: ClassVar[Mapping[str, Any]] = {}  # entries to write where `save` is not given them
    packings: ClassVar[tuple[str, ...]] = ()  # `quant_method` of weights that `unpack` reads exactly
    weights: ClassVar[WeightMap]

    def read(self, settings: Settings, length: int | None = None) -> TransformerConfig:
        """Read what a config.json describes; `length` is the number of tokens to serve."""
        settings = Entries(self._leave_out_ignored(settings))
        for name, expected in self.required.items():
            if (value := settings.get(name)) not in (None, expected):
                raise ValueError(
                    f"{name}: expected {expected!r} for {self.kind}, got {value!r}; not supported"
                )
        source = f"the config.json of {self.kind}"
        fields = dict(self.defaults)
        fields |= {field: read_size(name, settings.get(name), source) for name, field in self.sizes.items()}
        for name, field in self.entries.items():
            if name not in settings:
                continue
            fields[field] = settings[name]
            if field == "activation":
                fields[field] = read_activation(settings[name])
            elif isinstance(getattr(TransformerConfig, field), bool):
                fields[field] = read_flag(name, settings[name])
        fields |= self.read_more(settings, fields, length)
        harmless = {*HARMLESS, *self.harmless, *self.assumed}
        unread = {name: value for name, value in settings.list_unread().items() if name not in harmless}
        refuse_unread(self.kind, unread)
        return TransformerConfig(**fields)

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Write a config as entries of config.json; the inverse of `read`."""
        fields = vars(config) | {"activation": WRITTEN_ACTIVATIONS[config.activation]}
        names = {**self.sizes, **self._leave_out_ignored(self.entries)}
        plain = {name: fields[field] for name, field in names.items()}
        return {**plain, **self.write_more(config)}

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        """Return the fields that no single entry says, given those that one does."""
        return {}

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the entries that are no single field; the inverse of `read_more`."""
        return {}

    def weight_map(self, config: TransformerConfig) -> WeightMap:
        """Return the names of the tensors of a model with this config."""
        return self.weights

    def unpack(self, weights: WeightFiles) -> WeightFiles:
        """Return the files with tensors of floating point in place of those that are packed."""
        return weights

    def check_layers(self, settings: Settings, most: int, remedy: str) -> None:
        """Raise for more layers or experts than there can be, before one is built."""
        for name in self.layer_counts:
            count = settings.get(name)
            if isinstance(count, int) and count > most:
                raise ValueError(f"{name}: expected at most {most}, got {count}; {remedy}")

    def _leave_out_ignored(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries, of config.json or by their names, but for those that the family passes over."""
        return {name: value for name, value in entries.items() if self.kind not in IGNORED.get(name, ())}


def read_activation(name: Any) -> str:
    """Return our name of an activation."""
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]
