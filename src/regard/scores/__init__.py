"""Score functions, between scaling and bias or mask. Start from `softcap`, `alibi` and `modifier`."""

from regard.scores.distances import alibi as alibi
from regard.scores.distances import relative_bias as relative_bias
from regard.scores.metrics import bilinear as bilinear
from regard.scores.pointwise import modifier as modifier
from regard.scores.pointwise import softcap as softcap
from regard.scores.pointwise import temperature as temperature
from regard.scores.score import Score as Score
