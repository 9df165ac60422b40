"""Look inside a pretrained encoder: what "it" reads, in every head of MiniLM, and a page to look around in.

    make pretrained                      # once: 90 MB
    python examples/inspect_encoder.py [text]

Heads and layers are counted from 0.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from regard import inspection
from regard.interop import huggingface

TEXT = "The cat sat down on the mat because it was tired."


def main(text: str) -> None:
    loaded = huggingface.load(huggingface.find_minilm())
    encoding = loaded.tokenizer.encode(text)
    tokens = inspection.Tokens(encoding.tokens, ids=encoding.ids, spans=encoding.offsets)
    with inspection.capture(loaded.model, tokens=tokens, title=text) as trace:
        loaded.model(jnp.asarray([encoding.ids], jnp.int32))

    pieces = encoding.tokens
    reader = pieces.index("it") if "it" in pieces else len(pieces) - 2
    hidden = [0, reader, len(pieces) - 1]
    weights = np.stack([call.window(rows=slice(reader, reader + 1))[:, 0] for call in trace.calls])
    weights[..., hidden] = 0
    print(f'what "{pieces[reader]}" reads most, beside itself and the marks around the sentence:')
    print("head  " + "  ".join(f"layer {layer:<9}" for layer in range(len(weights))))
    for head in range(weights.shape[1]):
        cells = (f"{row[head].max():.2f} {pieces[row[head].argmax()]:<10}" for row in weights)
        print(f"{head:>4}  {'  '.join(cells)}".rstrip())

    page = Path("out") / "encoder.html"
    page.parent.mkdir(exist_ok=True)
    print(f"written: {trace.explore(page)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else TEXT)
