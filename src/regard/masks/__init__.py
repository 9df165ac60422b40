"""Masks as an algebra: composed instead of materialised; True = may attend, everywhere.

Start from `causal`, `sliding_window` and `segments`, and combine masks by `&`, `|` and `~`; `Mask.picture`
draws one, `parse` reads one from text. `from_array` and `predicate` take what no other mask expresses, and
the other `from_...` functions read the conventions of other libraries.
"""

from regard.masks import algebra as algebra  # masks made of masks: & | ~ and prepare
from regard.masks.block_tables import blocks, chosen_blocks
from regard.masks.conventions import (
    from_drop,
    from_flash_window,
    from_hf_attention_mask,
    from_hf_window,
    from_jax_window,
    from_torch_mha,
)
from regard.masks.diffusion import block_diffusion
from regard.masks.documents import segments
from regard.masks.expressions import shared_prefix, streaming
from regard.masks.key_lists import chosen_keys
from regard.masks.keys import lengths, prefix, valid_keys
from regard.masks.mask import Mask
from regard.masks.neighbourhoods import neighbourhood
from regard.masks.parsing import parse
from regard.masks.positional import causal, chunked, dilated, global_tokens, sliding_window
from regard.masks.predicates import predicate
from regard.masks.stored_masks import from_array
from regard.masks.tile_kinds import TileKind
from regard.masks.trees import tree

__all__ = ["Mask", "TileKind", "parse", "predicate"]
__all__ += ["block_diffusion", "causal", "chunked", "dilated", "global_tokens", "neighbourhood"]
__all__ += ["sliding_window", "streaming"]
__all__ += ["blocks", "chosen_blocks", "chosen_keys", "from_array", "lengths", "prefix", "segments"]
__all__ += ["shared_prefix", "tree", "valid_keys"]
__all__ += ["from_drop", "from_flash_window", "from_hf_attention_mask", "from_hf_window", "from_jax_window"]
__all__ += ["from_torch_mha"]
