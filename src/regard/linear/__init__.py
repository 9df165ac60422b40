"""Linear attention: a state of fixed size in place of all keys, with decay and the delta rule.

Start from `attend` for a sequence and from `step` for one token more; both give and take a `State`.
"""

from regard.linear.attention import attend, step
from regard.linear.problem import State

__all__ = ["State", "attend", "step"]
