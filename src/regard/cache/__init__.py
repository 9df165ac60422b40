"""Caches of keys and values for decoding: `append` stores tokens, `attend` attends to those that are stored.

Start from `KVCache.create`, one block of memory per row, which a `window` bounds and int8 shrinks;
`PagedKVCache` keeps pages that rows share.
"""

from regard.cache.contiguous import KVCache
from regard.cache.paged import PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
