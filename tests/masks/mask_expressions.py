"""Random expressions of the mask algebra, for hypothesis."""

import numpy as np
from hypothesis import strategies as st

from regard import masks


def within_two(query, key):
    return abs(query - key) <= 2


def trees(length):
    """Parents of up to `length` nodes, each before its children."""
    order = lambda drawn: [min(parent, node - 1) for node, parent in enumerate(drawn)] or [-1]
    return st.lists(st.integers(-1, length), max_size=length).map(order)


def block_tables(batch, queries, length):
    """Tables of up to 3 x 3 blocks, for each row or for all, and the same as listed numbers."""
    sizes = st.tuples(*(st.integers(1, 3).map(lambda count, n=n: -(-n // count)) for n in (queries, length)))

    @st.composite
    def draw_one(draw):
        size = draw(sizes)
        rows, columns = -(-queries // size[0]), -(-length // size[1])
        leading = (batch,) if batch and draw(st.booleans()) else ()
        shape = (*leading, rows, columns)
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        if draw(st.booleans()):
            return masks.blocks(rng.integers(0, 2, shape), size)
        numbers, counts = rng.integers(-1, columns + 1, (*shape[:-1], 2)), rng.integers(0, 3, shape[:-1])
        return masks.chosen_blocks(numbers, size, columns, counts=counts)

    return draw_one()


def leaves(batch, length, queries, opaque):
    """Every maker, with data for `batch` rows, `queries` queries and `length` keys."""
    small = st.integers(0, length)
    sizes = st.integers(1, length)
    ids = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    query_ids = st.lists(st.integers(0, 2), min_size=queries, max_size=queries)
    per_row = st.lists(small, min_size=batch, max_size=batch)
    axes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    makers = [
        st.just(masks.causal()),
        st.builds(masks.sliding_window, st.one_of(st.none(), small), st.one_of(st.none(), small)),
        st.builds(masks.chunked, sizes),
        st.builds(masks.dilated, sizes),
        st.builds(masks.global_tokens, small),
        st.builds(masks.prefix, st.one_of(small, per_row)),
        st.builds(masks.lengths, per_row),
        st.builds(masks.valid_keys, st.lists(ids, min_size=batch, max_size=batch)),
        st.builds(masks.segments, ids),
        st.builds(masks.shared_prefix, small, ids),
        st.builds(masks.streaming, small, small),
        st.builds(masks.block_diffusion, sizes, sizes),
        st.builds(masks.neighbourhood, axes, st.integers(0, 2)),
        st.builds(masks.tree, trees(length), st.one_of(small, per_row)),
        st.builds(masks.segments, st.lists(query_ids, min_size=batch, max_size=batch), ids),
    ]
    listed = st.lists(st.integers(-1, length), min_size=2, max_size=2)
    makers.append(st.builds(masks.chosen_keys, st.lists(listed, min_size=queries, max_size=queries)))
    makers.append(block_tables(0, queries, length))
    if opaque:
        makers.append(block_tables(batch, queries, length))
        bits = lambda n: [[n >> (t * s) % length & 1 for s in range(length)] for t in range(queries)]
        grid = st.integers(0, 2**length - 1).map(lambda n: np.array(bits(n)))
        makers += [st.just(masks.predicate(within_two)), st.builds(masks.from_array, grid)]
    return st.one_of(makers)


def expressions(batch, length, queries=None, opaque=True):
    """Leaves joined by & | ~. `opaque` adds those whose text does not read back."""
    queries = length if queries is None else queries
    prepare = lambda mask, offset: mask.prepare(queries, length, query_offset=offset, block=-(-length // 3))
    return st.recursive(
        leaves(batch, length, queries, opaque),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
            *([st.builds(prepare, inner, st.sampled_from([0, 0, 2]))] if opaque else []),
        ),
        max_leaves=4,
    )
