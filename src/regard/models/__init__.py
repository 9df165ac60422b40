"""Floor 7. Whole models: encoder, causal decoder, encoder-decoder, classifier, and greedy writing."""

from regard.models.classifier import Classifier as Classifier
from regard.models.config import TransformerConfig as TransformerConfig
from regard.models.decoder import Decoder as Decoder
from regard.models.encoder import Encoder as Encoder
from regard.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from regard.models.sampling import Sampling as Sampling
