"""What a wrong call is told: the argument, what was expected, what came, how to fix it."""

import inspect

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

import regard
from regard import attend, explain, layers, linear, masks, merge, models, parallel, positions, scores
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.options import DEFAULTS

Q, K, V = jnp.zeros((2, 3, 5, 7)), jnp.zeros((2, 3, 11, 7)), jnp.zeros((2, 3, 11, 13))


def array(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def capture_nothing(*shape):
    with regard.inspection.capture():
        attend(array(*shape), array(*shape), array(*shape))


def trace_of(*weights, **given):
    return regard.inspection.Trace.from_arrays(weights or None, **given)


EVEN = np.full((2, 3, 5, 11), 1 / 11, np.float32)
PART = V, array(2, 3, 11)
PACKED = masks.segments([1, 1, 2])
SIZES = {"d_model": 6, "num_heads": 3, "d_ff": 11, "num_layers": 1, "vocab_size": 13}
CONFIG = models.TransformerConfig(**SIZES)

# The kind of error, its words, and the arguments of `attend`, or another call.
WRONG = {
    "width": (ValueError, r"key: expected the head width of query, D = 7", {"key": array(2, 3, 11, 8)}),
    "length": (ValueError, r"value: expected one row per key, S = 11", {"value": array(2, 3, 12, 13)}),
    "no width": (ValueError, "query: expected a head width D of at least 1", {"query": array(2, 3, 5, 0), "key": array(2, 3, 11, 0)}),
    "rank": (ValueError, r"query: expected at least 2 axes .* got shape \(7,\)", {"query": array(7)}),
    "flag of another library": (TypeError, r"is_causal: expected an option among .*mask, .*write mask=masks\.causal\(\)", {"is_causal": True}),
    "misspelt option": (TypeError, "droput_rate: expected an option .*did you mean 'dropout_rate'", {"droput_rate": 0.1}),
    "integers": (TypeError, "query: expected a floating-point array, got int32", {"query": array(2, 3, 5, 7, dtype=jnp.int32)}),
    "heads": (ValueError, r"query heads \(3\) to be a multiple of key heads \(2\).*swap axes -3 and -2", {"key": array(2, 2, 11, 7), "value": array(2, 2, 11, 13)}),
    "batch": (ValueError, r"expected leading axes that broadcast; got query \(2, 3, 5, 7\)", {"key": array(4, 3, 11, 7), "value": array(4, 3, 11, 13)}),
    "key against value": (ValueError, "leading axes of key and value that broadcast", {"value": array(2, 2, 11, 13)}),
    "float mask": (TypeError, "mask: .*pass additive masks as `bias=`", {"mask": array(5, 11)}),
    "mask shape": (ValueError, r"mask: expected an array that broadcasts to \(\*B, T, S\) = \(2, 3, 5, 11\), got shape \(5, 12\)", {"mask": array(5, 12, dtype=bool)}),
    "mask of groups": (ValueError, "Its 5 axes are more than 4", {"mask": array(2, 1, 1, 5, 11, dtype=bool)}),
    "mask per batch": (ValueError, r"For one mask per batch row, add head axes: mask\[:, None\]", {"mask": array(2, 5, 11, dtype=bool)}),
    "mask per key": (ValueError, r"use masks\.valid_keys\(mask\)", {"mask": array(2, 11, dtype=bool)}),
    "mask misspelt": (TypeError, r"got 'sliding window\(7\)'; did you mean masks\.sliding_window\(before\)\?", {"mask": "sliding window(7)"}),
    "mask in words": (TypeError, r"mask: expected a masks\.Mask .*read text by masks\.parse", {"mask": "k <= q"}),
    "mask not called": (TypeError, r"mask: .* got causal; did you mean masks\.causal\(\)\?", {"mask": masks.causal}),
    "mask of a function": (TypeError, r"mask: .*wrap a function of positions by masks\.predicate", {"mask": lambda query, key: key <= query}),
    "masks in a list": (TypeError, r"a mask is no array: join several by & or \|", {"mask": [masks.causal(), masks.sliding_window(2)]}),
    "lengths for valid keys": (ValueError, "valid_keys: expected 11 entries on the last axis, one per key; got 2", {"mask": masks.valid_keys([5, 5])}),
    "slopes of fewer heads": (ValueError, r"slopes: expected .* got", {"score": scores.alibi(slopes=[0.5, 0.25]), "query_offset": 0}),
    "score not called": (TypeError, r"score: expected a scores\.Score .*did you mean scores\.softcap\(cap\)\?", {"score": scores.softcap}),
    "score of a function": (TypeError, r"score: .* got function; wrap a function as scores\.modifier", {"score": lambda score: score}),
    "no heads": (ValueError, r"expected at least one head, on axis -3; got query \(2, 0, 5, 7\)", {"query": array(2, 0, 5, 7)}),
    "lengths": (ValueError, r"lengths: expected leading axes that match the first leading axes of query, \(2, 3\); got \(4,\)", {"mask": masks.lengths([1, 2, 3, 4])}),
    "lengths of more axes": (ValueError, r"lengths: expected leading axes that match the first leading axes of query, \(2, 3\); got \(2, 3, 1\)", {"mask": masks.lengths(np.ones((2, 3, 1), int))}),
    "segments": (ValueError, "segments query_ids: expected 5 entries on the last axis, one per query; got 6", {"mask": masks.segments(np.zeros(6, int), np.zeros(11, int))}),
    "lengths first": (ValueError, r"are \(batch, length, heads, width\), of 9 tokens and 6 heads on 3, call", {"query": array(2, 9, 6, 7), "key": array(2, 9, 3, 7), "value": array(2, 9, 3, 7), "mask": masks.causal()}),
    "offset needed": (ValueError, "query_offset: expected where the queries sit, because T = 5 queries differ from S = 11", {"mask": masks.causal()}),
    "offset per head": (ValueError, r"query_offset: expected one integer, or one per first leading axis of query \(2,\)", {"query_offset": np.zeros(3, int)}),
    "offset of True": (TypeError, "query_offset: expected integers, got bool", {"query_offset": True}),
    "offset beyond int32": (ValueError, "query_offset: expected positions below 2147483647, .* up to 4294967297", {"mask": masks.causal(), "query_offset": 2**32 - 3}),
    "offset whose last row is beyond int32": (ValueError, "key_offset: expected positions below 2147483647", {"mask": masks.causal(), "query_offset": 0, "key_offset": np.array([0, 2**31 - 11])}),
    "positions beyond int64": (ValueError, "query_positions: expected integers that int32 holds", {"query_positions": [0, 1, 2, 3, 2**70]}),
    "bias bool": (TypeError, "bias: expected a floating-point array, got bool; pass boolean and 0/1 masks as `mask=`", {"bias": array(5, 11, dtype=bool)}),
    "scale": (ValueError, r"scale: expected one number or None for 1/sqrt\(D\)", {"scale": array(3)}),
    "scale true": (ValueError, r"scale: expected one number or None for 1/sqrt\(D\), got True", {"scale": True}),
    "rate one": (ValueError, r"dropout_rate: expected a rate in \[0, 1\), got 1\.0", {"dropout_rate": 1.0}),
    "rate nan": (ValueError, r"dropout_rate: expected a rate in \[0, 1\)", {"dropout_rate": float("nan")}),
    "rate text": (TypeError, "dropout_rate: expected a number known before tracing, got 'half'", {"dropout_rate": "half"}),
    "no rng": (ValueError, r"rng: expected a random key because dropout_rate = 0\.5, got None", {"dropout_rate": 0.5}),
    "many rngs": (TypeError, "rng: expected one random key", {"dropout_rate": 0.5, "rng": jax.random.split(jax.random.key(0), 3)}),
    "rng of streams": (TypeError, r"rng: expected one random key, got Rngs; rngs\.dropout\(\) draws one", {"dropout_rate": 0.5, "rng": nnx.Rngs(0)}),
    "rng of other words": (TypeError, r"rng: expected one random key.* whose raw form has 2 words; got an array of shape \(3,\)", {"dropout_rate": 0.5, "rng": np.zeros(3, np.uint32)}),
    "aux text": (TypeError, r"aux: expected a sequence of names, got the string 'lse'; write aux=\('lse',\)", {"aux": "lse"}),
    "backends": (ValueError, r"backend: expected one of .* or None, got \['dense'\]", {"backend": ["dense"]}),
    "aux name": (ValueError, "aux: expected names among weights, scores, .*; got 'weight'", {"aux": ("weight",)}),
    "ragged query": (TypeError, "query: expected a floating-point array, got list .*; lists within a list must be of one length", {"query": [[1.0], [2.0, 3.0]]}),
    "ragged mask": (TypeError, "mask: expected an array, got list .*must be of one length", {"mask": [[1], [0, 1]]}),
    "a mask for an offset": (TypeError, "query_offset: expected an array, got Causal", {"query_offset": masks.causal()}),
    "a bias beyond int32": (TypeError, "bias: expected a floating-point array, got int", {"bias": 2**40}),
    "a key for the scale": (ValueError, r"scale: expected one number .* dtype key<fry>", {"scale": jax.random.key(0)}),
    "sinks of a batch": (ValueError, r"sinks: expected one logit per head.*\(2, 3\); got shape \(2,\)", {"sinks": array(2)}),
    "sinks of more axes": (ValueError, r"sinks: .*got shape \(1, 2, 3\)", {"sinks": array(1, 2, 3)}),
    "sinks of integers": (TypeError, "sinks: expected a floating-point array, got int32", {"sinks": array(3, dtype=jnp.int32)}),
    "precision of another name": (ValueError, "precision: expected None, a name such as 'highest', .* got 'unknown'", {"precision": "unknown"}),
    "precision without hash": (ValueError, r"precision: .* got \[\]", {"precision": []}),
    "backend": (ValueError, "backend: expected one of .*tiled, dense.*did you mean 'dense'", {"backend": "dens"}),
    "an array beside a mask": (TypeError, r"&: .* got ndarray & Causal; .*masks\.from_array", lambda: np.ones((3, 3), bool) & masks.causal()),
    "a mask beside an array": (TypeError, r"\|: .* got Causal \| ndarray; .*masks\.from_array", lambda: masks.causal() | np.ones((3, 3), bool)),
    "a mask not called, right": (TypeError, r"got Causal & function; did you mean masks\.sliding_window\(before\)\?", lambda: masks.causal() & masks.sliding_window),
    "a mask not called, left": (TypeError, r"got function & SlidingWindow; did you mean masks\.causal\(\)\?", lambda: masks.causal & masks.sliding_window(2)),
    "masks under +": (TypeError, r"joined by & .* and \| .*not by arithmetic.* masks\.causal\(\) & masks\.sliding_window", lambda: masks.causal() + masks.sliding_window(2)),
    "a mask as an array": (TypeError, r"a mask is no array: .*mask\.dense\(T, S\)", lambda: np.asarray(masks.causal())),
    "masks under and": (TypeError, "instead of and, or, not", lambda: masks.causal() and masks.sliding_window(2)),
    "a window of a fraction": (TypeError, r"before: expected an integer known before tracing, got 2\.5", lambda: masks.sliding_window(2.5)),
    "a window of flash-attention below -1": (ValueError, "right: expected an integer of at least -1, got -2", lambda: masks.from_flash_window(-1, -2)),
    "fewer than no keys": (ValueError, r"num_keys: expected an integer of at least 0, got -1", lambda: masks.causal().tiles(2, -1, query_offset=0)),
    "text of a mask by half its name": (ValueError, r"`window\(3\)` is not a mask; did you mean sliding_window\(before\)\?$", lambda: masks.parse("window(3)")),
    "text of masks under +": (ValueError, r"masks are joined by & and \| and .*\. Known: block_diffusion", lambda: masks.parse("causal() + chunked(3)")),
    "text that is a program": (ValueError, "`__import__.'os'.` is not a mask", lambda: masks.parse("__import__('os')")),
    "slopes for a number of heads": (ValueError, r"num_heads: .* got \[0\.5, 0\.25\]; slopes of your own go as slopes=", lambda: scores.alibi([0.5, 0.25])),
    "a temperature of 0": (ValueError, "temperature: expected more than 0, got 0", lambda: scores.temperature(0.0)),
    "positions of fewer rows": (ValueError, r"position: expected an integer or integers of shape \(5,\) or \(2, 5\), got \(4,\)", lambda: positions.rotary(Q[..., :6], jnp.arange(4))),
    "a memory of other examples": (ValueError, r"query, key, value: expected leading axes that broadcast, got \(2,\), \(3,\), \(3,\)", lambda: layers.MultiHeadAttention(6, num_heads=3, rngs=nnx.Rngs(0))(array(2, 5, 6), array(3, 5, 6))),
    "a width of another layer": (ValueError, r"query: expected shape \(\*B, length, 6\), got \(2, 5, 7\)", lambda: layers.MultiHeadAttention(6, num_heads=3, rngs=nnx.Rngs(0))(array(2, 5, 7))),
    "heads that do not divide": (ValueError, "num_heads: expected a divisor of d_model = 7, got 3", lambda: layers.MultiHeadAttention(7, num_heads=3, rngs=nnx.Rngs(0))),
    "parts without lse": (TypeError, r"parts\[0\]: expected a pair of arrays \(output, lse\)", lambda: merge([(V, {"lse": K})])),
    "parts of three": (TypeError, r"parts\[1\]: expected a pair", lambda: merge([PART, (*PART, PART[1])])),
    "parts of integers": (TypeError, "expected floating-point arrays, got float32 and int", lambda: merge([(V, np.zeros((2, 3, 11), int))])),
    "parts whose lse is a column": (ValueError, r"expected output \(\*B, T, E\) and lse \(\*B, T\), got shapes", lambda: merge([(V, PART[1][..., None])])),
    "parts of other rows": (ValueError, r"parts\[1\]: expected an output of shape \(2, 3, 11, 13\)", lambda: merge([PART, (V[0], PART[1][0])])),
    "no parts": (ValueError, "expected at least one pair", lambda: merge([])),
    "a traced rate": (TypeError, "dropout_rate: expected a number known before tracing", lambda: jax.eval_shape(lambda rate: attend(Q, K, V, dropout_rate=rate, rng=jax.random.key(0)), 0.5)),
    "a turn wider than heads": (ValueError, r"rotary\.width: expected an even number in 2\.\.2, .* got 4", lambda: layers.MultiHeadAttention(6, 3, rotary=positions.Rotary(width=4), rngs=nnx.Rngs(0))),
    "heads of a cache": (ValueError, r"key: expected shape \(2, 2, n, 7\), the cache's rows, key heads", lambda: regard.KVCache.create(2, 2, 9, 7).append(Q, Q)),
    "more than a cache holds": (ValueError, "key: expected at most 4 tokens, the capacity; got 5", lambda: regard.KVCache.create(2, 3, 4, 7).append(Q, Q)),
    "text for a generator": (TypeError, "prompts: expected lists of tokens, got text", lambda: models.generate(models.Decoder(CONFIG, rngs=nnx.Rngs(0)), "hello", max_tokens=3)),
    "a share above 1": (ValueError, r"top_p: expected a number in \(0, 1\], got 1\.5", lambda: models.Sampling(top_p=1.5)),
    "a model of the network": (ValueError, r"bert-base-uncased: expected the config\.json of a model, found nothing", lambda: regard.interop.huggingface.load("bert-base-uncased")),
    "a name that is not there": (AttributeError, "module 'regard' has no attribute 'mask'; it has .*masks", lambda: regard.mask),
    "dense of more": (ValueError, "segments: expected 8 entries on the last axis, one per key; got 3", lambda: PACKED.dense(8)),
    "prepared for more": (ValueError, "segments: expected 6 entries on the last axis", lambda: (masks.causal() & PACKED).prepare(6)),
    "dense of an array": (ValueError, r"mask: expected an array that broadcasts to .* \(8, 8\), got shape \(3, 3\)", lambda: masks.from_array(np.eye(3, dtype=bool)).dense(8)),
    "dense of other rows": (ValueError, r"mask: expected data, .* broadcast.* got sizes \[2, 3\] on axis 0", lambda: (masks.lengths([1, 2]) & masks.lengths([1, 2, 3])).dense(4)),
    "tiles of other offsets": (ValueError, r"got sizes \[2, 3\] on axis 0", lambda: masks.lengths([1, 2]).tiles(4, key_offset=np.arange(3))),
    "dense of a shape": (TypeError, "mask: expected arrays to evaluate it with, got the shape of one", lambda: masks.lengths(jax.ShapeDtypeStruct((2,), int)).dense(4)),
    "a number for a mesh axis": (ValueError, "axis: expected an axis of the mesh, 'x'; got 5", lambda: parallel.use(jax.sharding.AbstractMesh((4,), ("x",)), 5)),
    "a word for devices": (TypeError, "devices: expected an integer .* got 'all'", lambda: parallel.to_zigzag(Q, "all")),
    "a chip of no platform": (ValueError, r"platform: expected one of cpu, gpu, tpu, got 'npu'", lambda: regard.planning.Chip("slow", {"float32": 1}, 1, 1, 1, 1, 1, 1, {}, "npu")),
    "a chip that does not multiply": (ValueError, r"flops\['float32'\]: expected a number above 0, got 0", lambda: regard.planning.Chip("slow", {"float32": 0}, 1, 1, 1, 1, 1, 1, {})),
    "a shape for linear attention": (TypeError, "query: expected an array, got a shape", lambda: linear.attend(jax.ShapeDtypeStruct((5, 7), "float32"), Q[0, 0], Q[0, 0])),
    "ids beyond int32": (ValueError, "key_ids: expected integers that int32 holds, got 8589934592", lambda: masks.segments([1], np.array([2**33]))),
    "dense beyond int32": (ValueError, "query_offset: expected positions below 2147483647", lambda: masks.causal().dense(3, query_offset=2**31 - 3)),
    "a predicate of one": (TypeError, r"fn: expected fn\(query, key\), fn\(batch, head, query, key\).* got .*\(a\)", lambda: masks.predicate(lambda a: a > 0)),
    "a predicate with names in others' places": (TypeError, r"fn: expected fn\(query, key\).* got .*\(key, q\)", lambda: masks.predicate(lambda key, q: q >= key)),
    "a modifier in another order": (TypeError, r"fn: expected fn\(score, batch, head, .*got .*\(score, query, key, batch, head\)", lambda: scores.modifier(lambda score, query, key, batch, head: score)),
    "a modifier of two": (TypeError, r"fn: expected fn\(score, batch, head, query_position, key_position\), got .*\(s, q\); ", lambda: scores.modifier(lambda s, q: s)),
    "an activation of another name": (ValueError, r"activation: .* got 'swish' \(did you mean silu\?\)", lambda: layers.FeedForward(6, 11, activation="swish", rngs=nnx.Rngs(0))),
    "a shape to compute with": (TypeError, "bias: expected an array, got a shape; explain takes shapes", lambda: attend(Q, K, V, bias=jax.ShapeDtypeStruct((5, 11), "float32"))),
    "more slots than int32 counts": (ValueError, "capacity: expected positions below 2147483647, which int32 holds", lambda: regard.KVCache.create(1, 1, 2**31, 1)),
    "precision of a layer": (ValueError, "precision: expected None, .* got 'best'", lambda: layers.FeedForward(6, 11, precision="best", rngs=nnx.Rngs(0))),
    "no heads of a layer": (TypeError, "num_heads: expected an integer .* got None", lambda: layers.MultiHeadAttention(6, None, rngs=nnx.Rngs(0))),
    "an epsilon below 0": (ValueError, "norm_epsilon: expected a number of at least 0, got -1", lambda: layers.MultiHeadAttention(6, 3, query_key_norm=True, norm_epsilon=-1, rngs=nnx.Rngs(0))),
    "another library's name of an option": (TypeError, r"attention\['num_kv_heads'\]: expected an option among .*; write num_key_heads=$", lambda: layers.EncoderBlock(6, 3, 11, attention={"num_kv_heads": 1}, rngs=nnx.Rngs(0))),
    "a word for an initializer": (TypeError, r"kernel_init: expected a function .* such as nnx.initializers.glorot_uniform\(\); got 'zeros'", lambda: layers.FeedForward(6, 11, kernel_init="zeros", rngs=nnx.Rngs(0))),
    "an axis that tokens do not have": (ValueError, r"axis: expected a sequence axis, of an array of shape \(3, 5\); got 2", lambda: parallel.to_zigzag(jnp.ones((3, 5)), 2, axis=2)),
    "an array for a cache": (TypeError, "cache: expected KVCache or PagedKVCache, got ndarray", lambda: layers.MultiHeadAttention(6, 3, rngs=nnx.Rngs(0))(Q[..., :6], cache=EVEN)),
    "counts without a cache": (ValueError, r"counts: expected None without a cache.*mask=masks\.lengths\(counts\)", lambda: layers.MultiHeadAttention(6, 3, rngs=nnx.Rngs(0))(Q[..., :6], counts=[5, 3])),
    "nothing to capture": (ValueError, r"query: expected at least one example .*leading axes \(0, 3\)", lambda: capture_nothing(0, 3, 5, 7)),
    "weights of NaN": (ValueError, r"weights\[0\]: expected numbers of at least 0, got nan", lambda: trace_of(EVEN * np.nan)),
    "weights that miss 1": (ValueError, r"weights\[0\]: expected weights .*sum to 1 .*a sum that is 0\.25 away; .*before dropout", lambda: trace_of(1.25 * EVEN)),
    "no weights from transformers": (ValueError, r"weights: .* got \(None, None\); in transformers, .*'eager'", lambda: trace_of(None, None)),
    "queries without keys": (ValueError, "expected weights, or query and key; got query$", lambda: trace_of(query=[Q])),
    "weights that the mask forbids": (ValueError, r"mask: expected weights of 0 .* others in weights\[0\]", lambda: trace_of(EVEN, mask=masks.causal(), query_offset=6)),
    "tokens of no weights": (ValueError, r"tokens: expected one per position of some call, whose lengths are 5, 11; got Tokens\(4 text", lambda: trace_of(EVEN, tokens=["a"] * 4)),
    "block mask": (TypeError, r"block_mask: .*; write mask=masks\.predicate\(fn\), with its mask_mod as fn", {"block_mask": None}),
    "temperature": (TypeError, r"temperature: .*; write score=scores\.temperature\(0\.8\)", {"temperature": 0.5}),
    "scale nan": (ValueError, "scale: expected a finite number, got nan", {"scale": float("nan")}),
    "scale infinite": (ValueError, "scale: expected a finite number, got inf", {"scale": np.float32("inf")}),
    "mask of nothing": (TypeError, r"mask: expected a boolean or integer array, nonzero = may attend, got \{\}(?!; pass)", {"mask": {}}),
    "predicate with and": (TypeError, "predicate: .* got a part that needs one number or NumPy; write &, .* for `and`", {"mask": masks.predicate(lambda q, k: q > k and k > 3), "query_offset": 0}),
    "predicate with and, of heads": (TypeError, "predicate: .*for `and`", {"mask": masks.predicate(lambda b, h, q, k: h == 0 and q > k), "query_offset": 0}),
    "predicate in NumPy": (TypeError, "predicate: expected fn to compute with arrays of jax.numpy", {"mask": masks.predicate(lambda q, k: np.asarray(q) > np.asarray(k)), "query_offset": 0}),
    "modifier with and": (TypeError, "modifier: .*for `and`", lambda: attend(Q, Q, Q, score=scores.modifier(lambda s, b, h, q, k: s if q > k else 0 * s))),
    "a chained comparison": (TypeError, "predicate: .* chained comparisons", lambda: masks.predicate(lambda q, k: 0 < k < q).dense(5)),
    "a predicate of nothing": (TypeError, "predicate: expected fn to return booleans .*got NoneType", lambda: masks.predicate(lambda q, k: None).dense(5)),
    "a predicate of another shape": (ValueError, r"predicate: expected fn to return one boolean per pair, .*\(5, 5\); got shape \(3,\)", lambda: masks.predicate(lambda q, k: jnp.ones(3, bool)).dense(5)),
    "a function beside a mask": (TypeError, r"&: .* got Causal & function; wrap a function of positions as masks\.predicate\(fn\)", lambda: masks.causal() & (lambda q, k: q > k)),
    "a score beside a mask": (TypeError, "&: .* got Softcap & Causal$", lambda: scores.softcap(2.0) & masks.causal()),
    "four by position": (TypeError, "attend: expected at most query, key, value by position, all others by name, such as mask=; got 4 by position", lambda: attend(Q, K, V, masks.causal())),
    "a width for a window": (TypeError, "window: expected an option among before, after; write before=", lambda: masks.sliding_window(window=3)),
    "a cache not created": (TypeError, r"batch: .*; write KVCache\.create\(\.\.\.\)", lambda: regard.KVCache(batch=2)),
    "heads to create a cache with": (TypeError, "heads: expected an option among batch, .*; write key_heads=", lambda: regard.KVCache.create(2, heads=3, capacity=8, key_width=7)),
    "a mask of linear attention": (TypeError, "mask: .*; write valid=, .* and causal=", lambda: linear.attend(Q, Q, Q, mask=masks.causal())),
    "heads of a configuration": (TypeError, "heads: .*; write num_heads=", lambda: models.TransformerConfig(**SIZES, heads=3)),
    "temperature of generate": (TypeError, r"temperature: .*; write sampling=Sampling\(temperature=0\.8, top_p", lambda: models.generate(None, [[1]], max_tokens=3, temperature=0.5)),
    "length of a step": (TypeError, "seq_len: .*; write length=", lambda: regard.planning.plan_step(CONFIG, seq_len=8)),
    "causal of a layer": (TypeError, r"causal: .*; write MultiHeadAttention\(...\)\(x, mask=masks.causal", lambda: layers.MultiHeadAttention(6, 3, causal=True, rngs=nnx.Rngs(0))),
    "causal of a layer's call": (TypeError, r"is_causal: .*; write mask=masks\.causal\(\)", lambda: layers.MultiHeadAttention(6, 3, rngs=nnx.Rngs(0))(Q[..., :6], is_causal=True)),
    "heads of a block's attention": (TypeError, r"attention\['heads'\]: .*; write num_heads=", lambda: layers.EncoderBlock(6, 3, 11, attention={"heads": 3}, rngs=nnx.Rngs(0))),
    "a word for a layer's scale": (ValueError, "scale: expected one number .* got 'text'", lambda: layers.MultiHeadAttention(6, 3, scale="text", rngs=nnx.Rngs(0))),
    "a dictionary for a configuration": (TypeError, r"config: expected TransformerConfig, got dict; write TransformerConfig\(", lambda: models.Decoder(SIZES, rngs=nnx.Rngs(0))),
    "a preset for a configuration": (TypeError, "config: expected TransformerConfig, got Preset; pass its config", lambda: models.EncoderDecoder(models.preset("gpt2"), rngs=nnx.Rngs(0))),
    "parameters of nothing": (TypeError, "config: expected a TransformerConfig, got NoneType", lambda: regard.planning.count_parameters(None)),
    "a number for sampling": (TypeError, "sampling: expected Sampling, got float", lambda: models.sampling.adjust(Q, 0.5)),
    "parts of nothing": (TypeError, r"parts: expected Iterable, got NoneType; pass pairs \(output, lse\)", lambda: merge(None)),
    "a readout of weights": (TypeError, "readout: expected Readout, got ndarray", lambda: regard.readouts.average(EVEN)),
    "changes in a list": (TypeError, "changes: expected Mapping, got list", lambda: regard.inspection.intervene([3]).__enter__()),
    "heads of no trace": (TypeError, "trace: expected a Trace, as of capture; got str", lambda: regard.inspection.find_heads("r", trace_of(EVEN))),
    "texts of a trace without tokens": (ValueError, r"query, key: .*, as the trace has no tokens; got 'r'", lambda: regard.inspection.find_heads(trace_of(EVEN), query="r")),
    "a number to observe": (TypeError, "fn: expected Callable, got int", lambda: regard.inspection.observe(3)(Q)),
    "text to contract": (TypeError, "scores: expected numbers, got str", lambda: regard.theory.gibbs.equilibrium("many")),
    "an option of weights of another library": (TypeError, "is_causal: expected an option among mask", lambda: trace_of(EVEN, is_causal=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_what_is_wrong(name, monkeypatch):
    kind, message, wrong = WRONG[name]
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    calls = [wrong]
    if isinstance(wrong, dict):
        arguments = {"query": Q, "key": K, "value": V} | wrong
        query, key, value = (arguments.pop(part) for part in ("query", "key", "value"))
        calls = [lambda call=call: call(query, key, value, **arguments) for call in (attend, explain)]
        if isinstance(query, jax.Array) and isinstance(value, jax.Array):
            traced = lambda *arrays: attend(*arrays, **arguments)
            calls.append(lambda: jax.eval_shape(traced, query, key, value))
    for call in calls:
        with pytest.raises(kind, match=f"(?s){message}"):
            call()


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_a_function_that_closes_over_explicit_axes_is_told_which_array(backend):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays, table = jax.device_put((Q, K, V + 1), place), np.tri(5, 11, 3, dtype=bool)

    def attend_by(table, name):
        keep = lambda query, key: jnp.asarray(table)[query, key]
        change = lambda score, b, h, query, key: score * jnp.asarray(table)[query, key].astype(score.dtype)
        options = {
            "predicate": {"mask": masks.predicate(keep)}, "modifier": {"score": scores.modifier(change)}
        }[name]  # fmt: skip
        return jax.jit(lambda *arrays: attend(*arrays, query_offset=0, backend=backend, **options))(*arrays)

    for name in ("predicate", "modifier"):
        message = rf"{name}: expected fn to close over arrays without explicit .* got table; .*numpy\.asarray"
        with pytest.raises(ValueError, match=message):
            attend_by(jax.device_put(table, place), name)
        np.testing.assert_array_equal(attend_by(table, name), V[:, :, :5] + 1)


class Foreign:
    """An array of another library: its dtype is not NumPy's."""

    dtype = "other.bool"

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.ndim = self.array.shape, self.array.ndim

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)


def test_arrays_of_other_libraries_are_taken():
    keep = np.tril(np.ones((5, 11), bool), 6)
    call = lambda **options: attend(Q, K, V + 1, **options)
    output = call(mask=keep)
    for given in (Foreign(keep), nnx.Variable(jnp.asarray(keep))):
        np.testing.assert_array_equal(call(mask=given), output)
    assert masks.valid_keys(Foreign([1, 0])) == masks.valid_keys([True, False])
    for given in (Foreign([1, 2]), nnx.Variable(jnp.array([1, 2]))):
        assert masks.lengths(given) == masks.lengths([1, 2])
    assert masks.segments(Foreign([3, 4])) == masks.segments([3, 4])
    assert repr(scores.alibi(slopes=Foreign([0.5, 0.25]))) == "alibi(slopes=[0.5, 0.25])"
    moved, expected = (call(mask=masks.causal(), query_offset=make([6, 2])) for make in (Foreign, np.array))
    np.testing.assert_array_equal(moved, expected)


def test_numpy_and_lists_are_welcome():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    expected = attend(*map(jnp.asarray, (x, x, x)), mask=np.tril(np.ones((3, 3), bool)))
    np.testing.assert_array_equal(attend(x, x, x, mask=[[1, 0, 0], [1, 1, 0], [1, 1, 1]]), expected)
    np.testing.assert_array_equal(attend(x.tolist(), x.tolist(), x.tolist(), mask=masks.causal()), expected)


def test_a_mask_that_fits_two_axes_is_refused_rather_than_guessed():
    call = lambda shape, **options: canonicalize(*[jax.ShapeDtypeStruct(shape, "float32")] * 3, **options)
    ones = lambda *shape: np.ones(shape, bool)
    x, y, z = (4, 4, 5, 3), (5, 2, 5, 3), (2, 3, 3, 5, 7)
    heads = r"the batch or the heads, both .*mask\[None\].*mask\[:, None\]"
    for shape, mask, message in (
        (x, ones(4, 5, 5), heads),
        (y, ones(5, 5), r"the batch or the queries, both 5.*masks\.valid_keys\(mask\)"),
        (x, masks.causal() & masks.from_array(ones(4, 5, 5)), "the batch or the heads"),
        (z, ones(3, 5, 5), "the batch or the heads"),
    ):
        with pytest.raises(ValueError, match=message):
            call(shape, mask=mask)
    with pytest.raises(ValueError, match=r"bias: .*the batch or the heads"):
        call(x, bias=np.ones((4, 5, 5), np.float32))
    for shape, mask in (
        (x, ones(1, 4, 5, 5)), (x, ones(4, 1, 5, 5)), (x, ones(5, 5)), (y, ones(1, 5, 5)), (z, ones(1, 3, 5, 5)),
        (y, masks.from_array(ones(5, 5))), ((4, 5, 3), ones(5, 5)),
    ):  # fmt: skip
        assert call(shape, mask=mask)


def test_a_refusing_backend_says_why(monkeypatch):
    from regard.engine.backends import dense, tiled
    from regard.engine.dispatch import registry

    monkeypatch.setattr(dense, "refuses", lambda problem: "it serves nobody today")
    monkeypatch.setattr(tiled, "refuses", lambda problem: "nor does it")
    with pytest.raises(NotImplementedError, match="'dense' cannot serve this call: it serves nobody today"):
        attend(Q, K, V, backend="dense")
    every = "no backend can serve this call:\n  tiled: nor does it\n  dense: it serves nobody"
    with pytest.raises(NotImplementedError, match=every):
        attend(Q, K, V)

    class Eager:
        refuses = staticmethod(lambda problem: None)
        run = staticmethod(dense.run)

    monkeypatch.setattr(registry, "BACKENDS", {"dense": dense, "eager": Eager})
    report = explain(Q, K, V)
    assert (report.backend, report.refusals) == ("eager", {"dense": "it serves nobody today"})
    assert "refused    dense: it serves nobody today" in str(report)


def test_explain_reads_shapes_alone():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    given = shape(1, 8, 1024, 64), shape(1, 2, 4096, 64), shape(1, 2, 4096, 32)
    report = explain(*given, mask=masks.causal(), query_offset=3072)
    assert report.shapes["output"] == (1, 8, 1024, 32)
    assert (report.query_heads, report.key_heads, report.backend) == (8, 2, "tiled")
    assert (report.tiles.empty, report.tiles.partial, report.tiles.full) == (28, 8, 220)
    assert report.dense_flops == 2 * 8 * 1024 * 4096 * (64 + 32)
    assert report.dense_bytes == 4 * 8 * 1024 * 4096, "scores are sums"
    assert report.flops == round(report.computes.computed * report.dense_flops)
    text = str(report)
    for words in (
        "causal()",
        "8 query heads in 2 groups",
        "28 empty, 8 partial, 220 full of 128 x 128; 89% hold",
        "a tile of scores at a time; all pairs would be 6.44 GFLOP and 134 MB of scores",
    ):
        assert words in text
    told = []

    def count(number):
        for options in ({"mask": masks.lengths(number)}, {"mask": masks.causal(), "query_offset": number}):
            told.append(str(explain(Q, K, V, **options)))

    jax.eval_shape(count, np.int32(6))
    assert all("not counted" in text for text in told)
    empty = explain(shape(2, 3, 0, 7), shape(2, 3, 11, 7), V, mask=masks.causal(), query_offset=0)
    assert "0 empty, 0 partial, 0 full of 128 x 128; 0% hold work" in str(empty)
    x = shape(2, 3, 5, 7)
    for kept in (jax.ShapeDtypeStruct((5, 5), bool), jax.ShapeDtypeStruct((2, 1, 5, 5), "int32")):
        assert "from_array(<bool[" in str(explain(x, x, x, mask=kept))
    many = jax.ShapeDtypeStruct((2,), np.int64)
    assert explain(x, x, x, mask=masks.lengths(many), query_offset=many).mask == "lengths(<int32[2]>)"
    options = {"scale": jax.ShapeDtypeStruct((), "float32"), "rows": many, "aux": ("weights",)}
    assert explain(x, x, x, dropout_rate=0.5, rng=jax.eval_shape(jax.random.key, 0), **options).backend
    metric = scores.bilinear(jnp.zeros((5, 7), jnp.bfloat16))
    assert explain(shape(2, 3, 11, 5), K, V, score=metric).shapes["output"] == (2, 3, 11, 13)


DATA = np.array([[0, 0, 1], [0, 1, 0]])
OF_ARRAYS = [
    lambda data: masks.tree(data - 1 if isinstance(data, np.ndarray) else data, 2),
    lambda data: masks.chosen_blocks(data, 2, 3, counts=np.ones(2, int)),
    lambda data: masks.blocks(data, 2),
    lambda data: masks.from_torch_mha(key_padding_mask=data),
    lambda data: masks.segments(DATA, data),
    lambda data: masks.shared_prefix(2, data),
    masks.from_array, masks.from_hf_attention_mask, masks.segments, masks.valid_keys, masks.lengths, masks.prefix,
]  # fmt: skip


def test_shapes_make_the_mask_of_their_shape():
    for make in OF_ARRAYS:
        of_arrays, of_shapes = map(make, (DATA, jax.ShapeDtypeStruct(DATA.shape, int)))
        assert jax.tree.structure(of_arrays) == jax.tree.structure(of_shapes)
        for one, other in zip(*map(jax.tree.leaves, (of_arrays, of_shapes)), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


# Of the dtype that is kept as it is.
OF_OWN_ARRAYS = {
    "bool": [masks.from_array, masks.valid_keys, lambda data: masks.blocks(data, 2), masks.from_drop],
    "int32": [
        lambda data: masks.tree(np.subtract(data, 2, out=data)),
        lambda data: masks.tree([-1], data[0]),
        lambda data: masks.segments(DATA, data),
        lambda data: masks.shared_prefix(data[0], data[1]),
        lambda data: masks.causal().prepare(4, query_positions=data[0], key_positions=data[1]),
        lambda data: masks.causal().prepare(4, query_offset=data[0], key_offset=data[1]),
        masks.segments, masks.lengths, masks.prefix, masks.chosen_keys,
    ],
    "float32": [
        lambda data: scores.alibi(slopes=data[0]), lambda data: scores.softcap(data[0]),
        lambda data: scores.temperature(data[0]), scores.relative_bias, scores.bilinear,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "make"), [(dtype, make) for dtype, makes in OF_OWN_ARRAYS.items() for make in makes]
)
def test_what_is_made_of_an_array_does_not_change_with_it(dtype, make):
    made = make(data := np.ones((4, 4), dtype))
    before = jax.tree.map(np.array, made)
    data[:] = 0
    jax.tree.map(np.testing.assert_array_equal, made, before)


def test_help_spells_out_every_option_of_attend():
    parameters = inspect.signature(attend).parameters
    assert list(parameters)[:3] == ["query", "key", "value"]
    assert {name: parameters[name].default for name in DEFAULTS} == dict(DEFAULTS)
    assert "options" not in parameters
