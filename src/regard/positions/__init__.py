"""Floor 1. Where a token stands: position tables to add, and rotary turns of queries and keys."""

from regard.positions.rotation import Rotary as Rotary
from regard.positions.rotation import rotary as rotary
from regard.positions.scaling import DynamicNTK as DynamicNTK
from regard.positions.scaling import Linear as Linear
from regard.positions.scaling import Llama3 as Llama3
from regard.positions.scaling import Scaling as Scaling
from regard.positions.scaling import YaRN as YaRN
from regard.positions.tables import learned as learned
from regard.positions.tables import sinusoidal as sinusoidal
from regard.positions.tables import sinusoidal_at as sinusoidal_at
