"""Families of pretrained models, one file each; `FAMILIES` lists them by the `model_type` of config.json.

A new one is a file with a subclass of `family.Family`, imported and listed here.
"""

from regard.interop.families.bert import Bert
from regard.interop.families.deepseek_v3 import DeepSeekV3
from regard.interop.families.deepseek_v32 import DeepSeekV32
from regard.interop.families.family import Family
from regard.interop.families.gemma2 import Gemma2
from regard.interop.families.gemma3 import Gemma3
from regard.interop.families.gpt2 import GPT2
from regard.interop.families.gpt_oss import GptOss
from regard.interop.families.kimi_linear import KimiLinear
from regard.interop.families.llama import Llama
from regard.interop.families.mistral import Mistral
from regard.interop.families.modernbert import ModernBert
from regard.interop.families.qwen import Qwen2, Qwen3
from regard.interop.families.qwen3_5 import Qwen35
from regard.interop.families.qwen3_moe import Qwen3Moe
from regard.interop.families.qwen3_next import Qwen3Next
from regard.interop.families.t5 import T5
from regard.interop.families.vit import ViT

_CLASSES: list[type[Family]] = [Bert, ModernBert, ViT, GPT2, Llama, Mistral, Qwen2, Qwen3, Qwen3Moe, Qwen35]
_CLASSES += [Qwen3Next, DeepSeekV3, DeepSeekV32, KimiLinear, Gemma2, Gemma3, GptOss, T5]
FAMILIES = {family.kind: family() for family in _CLASSES}
