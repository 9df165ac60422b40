"""Transformer models, published architectures as data, and text generation.

`Decoder`, `Encoder`, `EncoderDecoder` and `Classifier` are built from a `TransformerConfig`; `preset` looks
up a published one. `generate`, `stream` and `beam_search` write with a `Decoder` or an `EncoderDecoder`;
temperature, top-k, top-p and min-p are settings of `Sampling`.
"""

from regard.models.beams import Beams as Beams
from regard.models.beams import beam_search as beam_search
from regard.models.classifier import Classifier as Classifier
from regard.models.config import TransformerConfig as TransformerConfig
from regard.models.decoder import Decoder as Decoder
from regard.models.decoding_cache import DecodingCache as DecodingCache
from regard.models.encoder import Encoder as Encoder
from regard.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from regard.models.generation import Generated as Generated
from regard.models.generation import generate as generate
from regard.models.generation import stream as stream
from regard.models.presets import PRESETS as PRESETS
from regard.models.presets import Preset as Preset
from regard.models.presets import preset as preset
from regard.models.sampling import Sampling as Sampling
