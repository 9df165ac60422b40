"""Random expressions of the mask algebra, for hypothesis."""

import numpy as np
from hypothesis import strategies as st

from regard import masks


def within_two(query, key):
    return abs(query - key) <= 2


def trees(length):
    """Parents of up to `length` nodes, each before its children."""
    return st.lists(st.integers(-1, length), max_size=length).map(
        lambda drawn: [min(parent, node - 1) for node, parent in enumerate(drawn)] or [-1]
    )


def leaves(batch, length, queries, opaque):
    """Every maker, with data for `batch` rows, `queries` queries and `length` keys."""
    small = st.integers(0, length)
    sizes = st.integers(1, length)
    ids = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    query_ids = st.lists(st.integers(0, 2), min_size=queries, max_size=queries)
    per_row = st.lists(small, min_size=batch, max_size=batch)
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
        st.builds(
            masks.neighbourhood, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 2)
        ),
        st.builds(masks.tree, trees(length), st.one_of(small, per_row)),
        st.builds(masks.segments, st.lists(query_ids, min_size=batch, max_size=batch), ids),
    ]
    if opaque:
        grid = st.integers(0, 2**length - 1).map(
            lambda bits: np.array(
                [[bits >> (t * s) % length & 1 for s in range(length)] for t in range(queries)]
            )
        )
        makers += [st.just(masks.predicate(within_two)), st.builds(masks.from_array, grid)]
    return st.one_of(makers)


def expressions(batch, length, queries=None, opaque=True):
    """Leaves joined by & | ~. `opaque` adds those whose text does not read back."""
    return st.recursive(
        leaves(batch, length, length if queries is None else queries, opaque),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=4,
    )
