"""Floor 4. Linear attention: a state of fixed size in place of all keys; gated, delta rule, one step."""

from regard.linear.attention import attend as attend
from regard.linear.attention import step as step
from regard.linear.state import State as State
