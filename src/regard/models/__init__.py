"""Floor 7. Whole models: encoder, causal decoder, encoder-decoder, classifier; architectures as data."""

from regard.models.classifier import Classifier as Classifier
from regard.models.config import TransformerConfig as TransformerConfig
from regard.models.decoder import Decoder as Decoder
from regard.models.decoding import DecodingCache as DecodingCache
from regard.models.encoder import Encoder as Encoder
from regard.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from regard.models.presets import PRESETS as PRESETS
from regard.models.presets import Preset as Preset
from regard.models.presets import preset as preset
