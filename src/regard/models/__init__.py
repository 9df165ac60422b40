"""Floor 7. Whole models: encoder, causal decoder, encoder-decoder, classifier, and greedy writing.

The models are loaded when first named, so that `TransformerConfig` can be read without flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.models.config import TransformerConfig as TransformerConfig

if TYPE_CHECKING:
    from regard.models.classifier import Classifier as Classifier
    from regard.models.decoder import Decoder as Decoder
    from regard.models.encoder import Encoder as Encoder
    from regard.models.encoder_decoder import EncoderDecoder as EncoderDecoder

_HOMES = {
    "Classifier": "regard.models.classifier",
    "Decoder": "regard.models.decoder",
    "Encoder": "regard.models.encoder",
    "EncoderDecoder": "regard.models.encoder_decoder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
