"""Caches of keys and values for decoding: `KVCache`, and `PagedKVCache` for requests of any length.

Both store tokens by `append`; `regard.attend` attends to their `key` and `value`.
"""

from regard.cache.contiguous import KVCache as KVCache
from regard.cache.paged import PagedKVCache as PagedKVCache
