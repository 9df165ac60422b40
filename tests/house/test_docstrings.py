"""Public names say what they take, what they give, show it, and say whose idea it is."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_extensions"))
try:
    from names import MODULES, list_objects
finally:
    sys.path.pop(0)

# What the command line stands for has its examples there.
NAMES = {
    f"{module}.{name}": value
    for module in MODULES
    if not module.startswith("regard.training")
    for name, value, _ in list_objects(module)
    if callable(value)
}
# Seldom called by users: records that functions return, an enumeration, and the parts of `pages.write`.
RECORDS = (
    "regard.masks.TileKind",
    "regard.inspection.explorer.pages.bundle",
    "regard.inspection.explorer.pages.fill_page",
    "regard.inspection.explorer.pages.html",
    "regard.inspection.explorer.server.Serving",
    "regard.inspection.figures.Drawing",
    "regard.interop.onnx_ops.AttentionOutputs",
    "regard.interop.onnx_ops.LinearAttentionOutputs",
    "regard.planning.Estimate",
    "regard.planning.MemoryTooSmallError",
    "regard.theory.bilinear.MetricReport",
    "regard.theory.gibbs.Equilibrium",
    "regard.theory.gradients.Gradients",
    "regard.theory.hebbian.Recall",
    "regard.theory.hopfield.Retrieval",
    "regard.theory.steps.HeadSteps",
)


# Ideas that were published, and whose they are: the reference must name them.
PUBLISHED = {
    "regard.attend": ("Vaswani", "GQA", "Attention Sinks"),
    "regard.derive": ("Vaswani",),
    "regard.explain_einsum": ("Einstein",),
    "regard.KVCache": ("Shazeer",),
    "regard.PagedKVCache": ("Kwon",),
    "regard.merge": ("Milakov", "Hydragen"),
    "regard.interop.huggingface.cut_patches": ("Dosovitskiy",),
    "regard.interop.huggingface.find_minilm": ("MiniLM",),
    "regard.interop.onnx_ops.rotary_embedding": ("Su et al.",),
    "regard.interop.sentence_embeddings.embed": ("Sentence-BERT",),
    "regard.layers.DecoderBlock": ("Vaswani",),
    "regard.layers.EncoderBlock": ("Vaswani", "Xiong"),
    "regard.layers.Experts": ("Shazeer", "MegaBlocks"),
    "regard.layers.FeedForward": ("Vaswani", "GLU Variants"),
    "regard.layers.LatentAttention": ("DeepSeek",),
    "regard.layers.MultiHeadAttention": ("Vaswani", "GQA", "Query-Key Normalization"),
    "regard.layers.derive": ("Vaswani",),
    "regard.linear.attend": ("Katharopoulos", "Gated Linear Attention", "Delta"),
    "regard.linear.step": ("Katharopoulos",),
    "regard.masks.block_diffusion": ("Arriola",),
    "regard.masks.causal": ("Vaswani",),
    "regard.masks.dilated": ("Child",),
    "regard.masks.global_tokens": ("Beltagy",),
    "regard.masks.neighbourhood": ("Hassani",),
    "regard.masks.predicate": ("Flex",),
    "regard.masks.prefix": ("Raffel",),
    "regard.masks.segments": ("Krell",),
    "regard.masks.shared_prefix": ("Krell", "Hydragen"),
    "regard.masks.sliding_window": ("Beltagy",),
    "regard.masks.streaming": ("Attention Sinks",),
    "regard.masks.tree": ("SpecInfer", "Medusa"),
    "regard.masks.blocks": ("Sparse Transformers",),
    "regard.masks.chosen_blocks": ("Native Sparse Attention", "MoBA"),
    "regard.models.Classifier": ("BERT", "Set Transformer"),
    "regard.models.Decoder": ("Liu",),
    "regard.models.Encoder": ("Vaswani",),
    "regard.models.EncoderDecoder": ("Vaswani",),
    "regard.models.beam_search": ("Graves", "Wu et al."),
    "regard.models.generate": ("Leviathan", "Chen et al."),
    "regard.models.sampling.min_p": ("Nguyen",),
    "regard.models.sampling.repetition_penalty": ("Keskar",),
    "regard.models.sampling.temperature": ("Ackley",),
    "regard.models.sampling.top_k": ("Fan et al.",),
    "regard.models.sampling.top_p": ("Holtzman",),
    "regard.positions.DynamicNTK": ("Peng",),
    "regard.positions.Linear": ("Chen",),
    "regard.positions.Llama3": ("Llama 3",),
    "regard.positions.Rotary": ("Su et al.",),
    "regard.positions.YaRN": ("Peng",),
    "regard.positions.learned": ("Gehring",),
    "regard.positions.rotary": ("Su et al.",),
    "regard.positions.sinusoidal": ("Vaswani",),
    "regard.positions.sinusoidal_at": ("Vaswani",),
    "regard.readouts.label": ("Clark", "Olsson"),
    "regard.inspection.contribute": ("Elhage",),
    "regard.inspection.predict_layers": ("nostalgebraist", "Elhage"),
    "regard.inspection.read_layers": ("nostalgebraist",),
    "regard.inspection.roll_out": ("Abnar",),
    "regard.inspection.roll_out_row": ("Abnar",),
    "regard.inspection.weigh_values": ("Kobayashi",),
    "regard.inspection.attribute_heads": ("Nanda", "Syed", "Hanna"),
    "regard.inspection.sweep_heads": ("Michel", "Wang"),
    "regard.inspection.intervene": ("Meng", "Wang"),
    "regard.inspection.record_repeats": ("Olsson",),
    "regard.readouts.read": ("FlashAttention",),
    "regard.scores.alibi": ("Press",),
    "regard.scores.bilinear": ("Luong",),
    "regard.scores.relative_bias": ("Raffel",),
    "regard.scores.softcap": ("Gemma",),
    "regard.scores.temperature": ("Hinton",),
    "regard.theory.bilinear.scaled_metric": ("Vaswani",),
    "regard.theory.gibbs.entropy_nats": ("Shannon",),
    "regard.theory.gibbs.equilibrium": ("Gibbs",),
    "regard.theory.gibbs.gibbs_weights": ("Gibbs",),
    "regard.theory.gibbs.log_partition": ("Gibbs",),
    "regard.theory.gradients.attention_gradients": ("FlashAttention",),
    "regard.theory.gradients.output_gradients": ("FlashAttention",),
    "regard.theory.gradients.score_gradients": ("FlashAttention",),
    "regard.theory.heads.effective_rank": ("Roy and Vetterli",),
    "regard.theory.heads.head_entropy": ("Clark",),
    "regard.theory.heads.jensen_shannon": ("Lin",),
    "regard.theory.heads.rollout": ("Abnar",),
    "regard.theory.hebbian.hebbian_capacity": ("Amit",),
    "regard.theory.hebbian.hebbian_weights": ("Hopfield",),
    "regard.theory.hebbian.ising_energy": ("Hopfield",),
    "regard.theory.hebbian.recall": ("Hopfield",),
    "regard.theory.hebbian.sign_update": ("Hopfield",),
    "regard.theory.hopfield.capacity": ("Ramsauer",),
    "regard.theory.hopfield.energy": ("Ramsauer",),
    "regard.theory.hopfield.growth": ("Ramsauer",),
    "regard.theory.hopfield.retrieve": ("Ramsauer",),
    "regard.theory.hopfield.separation": ("Ramsauer",),
    "regard.theory.hopfield.update": ("Ramsauer",),
    "regard.theory.notation.explain_einsum": ("Einstein",),
    "regard.theory.steps.attention_steps": ("Vaswani",),
    "regard.theory.steps.multi_head": ("Vaswani",),
    "regard.parallel.all_to_all_attend": ("Ulysses",),
    "regard.parallel.ring_attend": ("Ring Attention", "Striped Attention"),
    "regard.parallel.to_zigzag": ("Llama 3",),
    "regard.planning.plan": ("Roofline",),
    "regard.planning.plan_step": ("ZeRO", "Sublinear"),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECORDS])
def test_a_public_name_is_documented(name):
    value = NAMES[name]
    text = inspect.getdoc(value) or ""
    assert text.splitlines()[0].endswith("."), "the first line is a sentence"
    assert "Example:" in text
    assert ">>>" in text
    takes = [p for p in inspect.signature(value).parameters if p not in ("self", "args", "kwargs")]
    if dataclasses.is_dataclass(value) and "Args:" not in text:
        # Fields are described where they are declared.
        assert inspect.getsource(value).count('"""') >= 2 * len(takes)
    elif takes and name != "regard.masks.Mask":
        assert "Args:" in text
        lists = re.findall(r"^ +([\w*, ]+):", text, re.M)  # "key, value: as in `attend`"
        described = {one.strip(" *") for names in lists for one in names.split(",")}
        missing = [parameter for parameter in takes if parameter not in described]
        assert not missing, f"not described: {missing}"
    if inspect.isfunction(value):
        assert "Returns:" in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_idea_names_its_source(name):
    _, found, reference = " ".join(inspect.getdoc(NAMES[name]).split()).partition("Reference:")
    assert found, "say whose idea it is"
    missing = [source for source in PUBLISHED[name] if source not in reference]
    assert not missing, f"not referred to: {missing}"
    assert any(word.strip(".,;:()").isdigit() for word in reference.split()), "the year, at least"


def test_what_has_a_reference_is_in_the_table():
    """So that the table grows with the package; software that a name follows is no publication."""
    software = (
        "jax",
        "JAX",
        "flax",
        "PyTorch",
        "transformers 5",
        "of transformers",
        "ONNX",
        "flash-attention",
    )
    texts = {name: inspect.getdoc(value) or "" for name, value in NAMES.items()}
    referring = {name: text.partition("Reference:")[2] for name, text in texts.items()}
    papers = {name for name, text in referring.items() if text and not any(word in text for word in software)}
    aliases = {"regard.cache.KVCache", "regard.cache.PagedKVCache", "regard.derivation.derive"}
    assert papers - aliases <= set(PUBLISHED)


def test_the_list_is_not_empty():
    known = {"regard.attend", "regard.derive", "regard.masks.causal", "regard.models.Encoder"}
    assert known | {"regard.positions.rotary", "regard.inspection.capture"} <= set(NAMES)
    assert len(NAMES) > 150
