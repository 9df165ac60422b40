"""Transformer models, published architectures as data, and text generation.

Start from `TransformerConfig` or a `preset`, build a `Decoder`, `Encoder`, `EncoderDecoder` or `Classifier`
from it, and write with `generate` or `stream`; temperature, top-k, top-p and min-p are settings of
`Sampling`. Needs the extra `regard[models]`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.models import sampling
    from regard.models.beams import Beams, beam_search
    from regard.models.classifier import Classifier
    from regard.models.config import TransformerConfig
    from regard.models.decoder import Decoder
    from regard.models.encoder import Encoder
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.generation import TextStream, generate, stream
    from regard.models.presets import PRESETS, Preset, preset
    from regard.models.prompts import TextCache
    from regard.models.sampling import Sampling
    from regard.models.stack import DecodingCache
    from regard.models.writing import Generated

__all__ = [
    "PRESETS", "Beams", "Classifier", "Decoder", "DecodingCache", "Encoder", "EncoderDecoder", "Generated",
    "Preset", "Sampling", "TextCache", "TextStream", "TransformerConfig", "beam_search", "generate", "preset",
    "sampling", "stream",
]  # fmt: skip

__getattr__, __dir__ = defer(
    __name__,
    "models",
    __all__,
    beams="Beams beam_search",
    classifier="Classifier",
    config="TransformerConfig",
    decoder="Decoder",
    encoder="Encoder",
    encoder_decoder="EncoderDecoder",
    generation="TextStream generate stream",
    presets="PRESETS Preset preset",
    prompts="TextCache",
    sampling="Sampling",
    stack="DecodingCache",
    writing="Generated",
)
