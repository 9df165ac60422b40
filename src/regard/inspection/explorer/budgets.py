"""Budgets of a page: how much of a trace it carries, and the order in which things are left out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

TARGET_BYTES = 5_000_000  # what is only a comfort is carried up to here
LARGEST_EXACT = 2_000_000  # cells in all of a trace whose weights are carried one by one
LARGEST_HALF = 500_000  # and of one where they are float16
LARGEST_FEATURES = 250_000  # numbers of queries and keys that are carried
LARGEST_PREDICTIONS = 250_000  # numbers of what layers would predict
TOP_K = 8


@dataclass(frozen=True)
class Plan:
    """The contents of a page, as far as they can be left out."""

    pinned: int  # heads, the first of those chosen, that are carried in detail
    exact: bool = True  # each weight of short calls; False, of pinned heads alone
    top_k: bool = True  # the largest weights of each row of every head; False, of pinned heads alone
    features: bool = True  # queries and keys, where they are few
    predictions: bool = False  # behind each layer
    bins: int = 512  # most entries of a profile along the rows or the keys
    atlas: int = 64  # most blocks along each axis of the level that every head has
    largest: bool = True  # weight of each block of every head; False, of pinned heads alone


# What is left out, in this order: a field of the plan, the least it can be, and what that means.
_STEPS = (
    ("top_k", False, f"the {TOP_K} largest weights of each row are listed for pinned heads alone"),
    ("features", False, "queries and keys are left out"),
    ("predictions", False, "what layers would predict is left out"),
    ("bins", 128, "profiles along rows and keys have 128 entries instead of 512"),
    ("atlas", 32, "the atlas has 32 x 32 blocks for each head instead of 64 x 64"),
    ("largest", False, "the largest weight of each block is there for pinned heads alone"),
    ("exact", False, "weights one by one are there for pinned heads alone"),
)


def degrade(plan: Plan) -> Iterator[tuple[Plan, str]]:
    """Yield smaller and smaller plans, each with what the step to it leaves out, in a fixed order."""
    for name, least, sentence in _STEPS:
        if getattr(plan, name) > least:
            plan = replace(plan, **{name: least})
            yield plan, sentence
    while plan.pinned:
        plan = replace(plan, pinned=plan.pinned // 2)
        some = {0: "no head is", 1: "only 1 head is"}.get(plan.pinned, f"only {plan.pinned} heads are")
        yield plan, f"{some} pinned"
