"""Titles of papers, in quotation marks, lead to arXiv where they are there."""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

PAPERS = {
    "1211.3711": "Sequence Transduction with Recurrent Neural Networks",
    "1503.02531": "Distilling the Knowledge in a Neural Network",
    "1508.04025": "Effective Approaches to Attention-based Neural Machine Translation",
    "1604.06174": "Training Deep Nets with Sublinear Memory Cost",
    "1606.08415": "Gaussian Error Linear Units",
    "1609.08144": "Google's Neural Machine Translation System",
    "1701.06538": "Outrageously Large Neural Networks",
    "1705.03122": "Convolutional Sequence to Sequence Learning",
    "1706.03762": "Attention Is All You Need",
    "1801.10198": "Generating Wikipedia by Summarizing Long Sequences",
    "1805.02867": "Online normalizer calculation for softmax",
    "1805.04833": "Hierarchical Neural Story Generation",
    "1810.00825": "Set Transformer",
    "1810.04805": "BERT",
    "1904.09751": "The Curious Case of Neural Text Degeneration",
    "1904.10509": "Generating Long Sequences with Sparse Transformers",
    "1905.10650": "Are Sixteen Heads Really Better than One?",
    "1906.04341": "What Does BERT Look At?",
    "1908.10084": "Sentence-BERT",
    "1909.05858": "CTRL",
    "1910.02054": "ZeRO",
    "1910.10683": "Exploring the Limits of Transfer Learning",
    "1911.02150": "Fast Transformer Decoding",
    "2002.04745": "On Layer Normalization in the Transformer Architecture",
    "2002.05202": "GLU Variants Improve Transformer",
    "2002.10957": "MiniLM",
    "2004.05150": "Longformer",
    "2004.10102": "Attention is Not Only a Weight",
    "2005.00928": "Quantifying Attention Flow in Transformers",
    "2006.16236": "Transformers are RNNs",
    "2008.02217": "Hopfield Networks is All You Need",
    "2010.04245": "Query-Key Normalization for Transformers",
    "2010.11929": "An Image is Worth 16x16 Words",
    "2104.09864": "RoFormer",
    "2106.02997": "Causal Abstractions of Neural Networks",
    "2107.02027": "Efficient Sequence Packing without Cross-contamination",
    "2108.12409": "Train Short, Test Long",
    "2202.05262": "Locating and Editing Factual Associations in GPT",
    "2204.07143": "Neighborhood Attention Transformer",
    "2205.14135": "FlashAttention",
    "2209.11895": "In-context Learning and Induction Heads",
    "2211.00593": "Interpretability in the Wild",
    "2211.15841": "MegaBlocks",
    "2211.17192": "Fast Inference from Transformers via Speculative Decoding",
    "2302.01318": "Accelerating Large Language Model Decoding with Speculative Sampling",
    "2305.09781": "SpecInfer",
    "2305.13245": "GQA",
    "2306.15595": "Extending Context Window of Large Language Models via Positional Interpolation",
    "2309.00071": "YaRN: Efficient Context Window Extension of Large Language Models",
    "2309.06180": "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    "2309.14509": "DeepSpeed Ulysses",
    "2309.17453": "Efficient Streaming Language Models with Attention Sinks",
    "2310.01889": "Ring Attention with Blockwise Transformers",
    "2310.10348": "Attribution Patching Outperforms Automated Circuit Discovery",
    "2311.09431": "Striped Attention",
    "2312.06635": "Gated Linear Attention Transformers",
    "2401.06066": "DeepSeekMoE",
    "2401.10774": "Medusa",
    "2402.05099": "Hydragen",
    "2403.00824": "Information Flow Routes",
    "2403.17806": "Have Faith in Faithfulness",
    "2405.04434": "DeepSeek-V2",
    "2405.07719": "USP",
    "2407.01082": "Turning Up the Heat: Min-p Sampling",
    "2407.21783": "The Llama 3 Herd of Models",
    "2408.00118": "Gemma 2",
    "2412.05496": "Flex Attention",
    "2412.06464": "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    "2412.19437": "DeepSeek-V3",
    "2502.11089": "Native Sparse Attention",
    "2502.13189": "MoBA",
    "2503.09573": "Block Diffusion",
    "2505.06708": "Gated Attention for Large Language Models",
    "2510.26692": "Kimi Linear: An Expressive, Efficient Attention Architecture",
}
NUMBERS = {title: number for number, title in PAPERS.items()}
NUMBERS |= {title.partition(": ")[0]: NUMBERS[title] for title in list(NUMBERS)}  # by what comes before
QUOTED = re.compile(r'"([^"]+)"')


class Cite(SphinxPostTransform):
    """Put references around titles, outside of code and of other references."""

    default_priority = 7

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            parents = (nodes.literal, nodes.literal_block, nodes.reference, nodes.title, nodes.raw)
            if '"' in text and not isinstance(text.parent, parents):
                text.parent.replace(text, self._split(text.astext()))

    def _split(self, text: str) -> list[nodes.Node]:
        parts, start = [], 0
        for match in QUOTED.finditer(text):
            if number := NUMBERS.get(" ".join(match[1].split())):
                parts.append(nodes.Text(text[start : match.start(1)]))
                parts.append(nodes.reference("", match[1], refuri=f"https://arxiv.org/abs/{number}"))
                start = match.end(1)
        return [*parts, nodes.Text(text[start:])]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(Cite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
