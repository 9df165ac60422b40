"""Caches of keys and values for decoding; they store, and `regard.attend` attends to what they hold.

Start from `KVCache.create`, one block of memory per row, which a `window` bounds; `PagedKVCache` keeps pages
that rows share.
"""

from regard.cache.contiguous import KVCache
from regard.cache.paged import PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
