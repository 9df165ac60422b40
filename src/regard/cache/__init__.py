"""Floor 2. Caches of keys and values for decoding. They store; attention over them is `regard.attend`."""

from regard.cache.contiguous import KVCache as KVCache
from regard.cache.paged import PagedKVCache as PagedKVCache
