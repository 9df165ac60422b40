"""Masks as an algebra: functions that make them, and `&`, `|`, `~` that combine them. True = may attend.

Start from `causal`, `segments` and `Mask`.
"""

from regard.masks.algebra import Mask as Mask
from regard.masks.conventions import from_drop as from_drop
from regard.masks.conventions import from_flash_window as from_flash_window
from regard.masks.conventions import from_hf_attention_mask as from_hf_attention_mask
from regard.masks.conventions import from_hf_window as from_hf_window
from regard.masks.conventions import from_jax_window as from_jax_window
from regard.masks.conventions import from_torch_mha as from_torch_mha
from regard.masks.documents import segments as segments
from regard.masks.keys import lengths as lengths
from regard.masks.keys import prefix as prefix
from regard.masks.keys import valid_keys as valid_keys
from regard.masks.notation import parse as parse
from regard.masks.positional import causal as causal
from regard.masks.positional import chunked as chunked
from regard.masks.positional import dilated as dilated
from regard.masks.positional import global_tokens as global_tokens
from regard.masks.positional import sliding_window as sliding_window
from regard.masks.predicates import predicate as predicate
from regard.masks.stored import from_array as from_array
from regard.masks.tile_kinds import TileKind as TileKind
