"""Inspection: traces of what a model attends to, figures of it, and the explorer's page.

Start from `capture`, which watches a model run and gives a `Trace` of `Call`s: every head's statistics and,
at any length, exact windows of its weights. `Trace.save` and `load` keep it in a file, `Trace.explore` writes
a page to look around in. `find_heads` searches for heads by what they read. `observe` returns statistics from
inside `jit`; `intervene` changes calls while a model runs: heads switched off, or given what another run
computed; `sweep_heads` and `attribute_heads` say what each head is worth, `predict_layers` what each layer
would predict, `decompose_score` why a head looked where it did, `trace_paths` by which heads and tokens a
prediction came. `figures` draws, with the extra `regard[look]`. Names load on first use.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.inspection import explorer, figures
    from regard.inspection.contributions import contribute, read_layers, weigh_values
    from regard.inspection.head_effects import attribute_heads, sweep_heads
    from regard.inspection.head_search import FoundHead, find_heads
    from regard.inspection.interventions import Change, intervene
    from regard.inspection.layer_predictions import predict_layers
    from regard.inspection.observations import observe
    from regard.inspection.paths import Edge, Paths, trace_paths
    from regard.inspection.rollouts import roll_out, roll_out_row
    from regard.inspection.score_parts import ScoreParts, decompose_score
    from regard.inspection.tokens import Tokens
    from regard.inspection.traces import Call, Trace, capture, load, record, record_repeats

__all__ = ["Call", "Change", "Edge", "FoundHead", "Paths", "ScoreParts", "Tokens", "Trace", "attribute_heads"]
__all__ += ["capture", "contribute", "decompose_score", "explorer", "figures", "find_heads", "intervene"]
__all__ += ["load", "observe", "predict_layers", "read_layers", "record", "record_repeats", "roll_out"]
__all__ += ["roll_out_row", "sweep_heads", "trace_paths", "weigh_values"]

__getattr__, __dir__ = defer(
    __name__,
    "look",
    __all__,
    contributions="contribute read_layers weigh_values",
    head_effects="attribute_heads sweep_heads",
    head_search="FoundHead find_heads",
    interventions="Change intervene",
    layer_predictions="predict_layers",
    observations="observe",
    paths="Edge Paths trace_paths",
    rollouts="roll_out roll_out_row",
    score_parts="ScoreParts decompose_score",
    tokens="Tokens",
    traces="Call Trace capture load record record_repeats",
)
