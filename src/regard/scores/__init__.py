"""Score functions: differentiable changes to the scaled scores, made before bias and mask.

Start from `softcap` and `alibi`, or from `modifier`, which turns a function of score and positions into one.
Pass one, or several from left to right, as `attend(score=...)`.
"""

from regard.scores.bilinear_forms import bilinear
from regard.scores.distances import alibi, relative_bias
from regard.scores.pointwise import modifier, softcap, temperature
from regard.scores.score import Score

__all__ = ["Score", "alibi", "bilinear", "modifier", "relative_bias", "softcap", "temperature"]
