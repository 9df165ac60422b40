"""Attention as it is defined, in several languages: an oracle for tests and docs, which no computation uses.

Start from `explain_einsum`, `steps.attention_steps` and `gibbs.equilibrium`.

- `definition`: every line of attention and of its gradients, in NumPy: `attention`, `gradients`
- `notation`: index notation: `explain_einsum`, `contract`
- `steps`: the forward pass: `attention_steps`, `multi_head`
- `gradients`: every gradient by hand: `attention_gradients`, `score_gradients`
- `bilinear`: scores as metrics: `scaled_metric`, `bilinear_form`, `check_metric`
- `gibbs`: softmax as equilibrium: `equilibrium`, `log_partition`, `temperature_sweep`
- `hopfield`: memories whose update is attention: `energy`, `update`, `retrieve`, `capacity`
- `hebbian`: classical Hopfield networks: `hebbian_weights`, `recall`
- `heads`: heads compared: `cosine_similarity`, `diversity`, `effective_rank`, `rollout`

Functions compute in the common dtype of their arrays, float32 at least. They raise TypeError for arrays that
are not floating-point and masks that are not boolean, ValueError for shapes that do not fit.
"""

from regard.theory import bilinear, definition, gibbs, gradients, heads, hebbian, hopfield, notation, steps
from regard.theory.notation import contract, explain_einsum

__all__ = ["bilinear", "contract", "definition", "explain_einsum", "gibbs", "gradients", "heads", "hebbian"]
__all__ += ["hopfield", "notation", "steps"]
