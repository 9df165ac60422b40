"""gpt-oss: alternating windows, sinks, YaRN, and experts, whose weights may be packed in four bits each."""

from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from regard.interop.families.entries import demand_same, read_number
from regard.interop.families.llama import BLOCK, LAYER, NORMS, Llama, build_map
from regard.interop.families.rotary import read_rotary
from regard.interop.families.sliding_windows import read_windows, write_windows
from regard.interop.weight_files import Stored, WeightFiles
from regard.interop.weight_maps import Fields, Pair, Settings, linear, take_every
from regard.models import TransformerConfig
from regard.models.presets import GPT_OSS

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_EXPERTS, _BRANCH = f"{LAYER}.mlp.experts", f"{BLOCK}.feed_forward"


class GptOss(Llama):
    """gpt-oss as a Decoder."""

    kind = "gpt_oss"
    architecture = "GptOssForCausalLM"
    num_key_heads = 8
    sizes: ClassVar = {
        **Llama.sizes, "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
    }  # fmt: skip
    entries: ClassVar = {
        name: Llama.entries[name] for name in ("rms_norm_eps", "attention_bias", "tie_word_embeddings")
    }
    defaults: ClassVar = GPT_OSS
    # Its experts have an activation of their own, whatever hidden_act says.
    required: ClassVar = {**Llama.required, "hidden_act": "silu", "swiglu_alpha": 1.702}
    harmless: ClassVar = (
        *Llama.harmless, "output_router_logits", "router_aux_loss_coef", "quantization_config",
    )  # fmt: skip
    packings: ClassVar = ("mxfp4",)
    weights = build_map(
        *NORMS,
        Pair(f"{LAYER}.self_attn.sinks", f"{BLOCK}.attention.sinks"),
        *linear(f"{LAYER}.mlp.router", f"{_BRANCH}.router"),
        *(
            Pair(f"{_EXPERTS}.gate_up_proj{end}", f"{_BRANCH}.{name}.{ours}", take_every(index, 2))
            for index, name in enumerate(("gate", "widen"))
            for end, ours in (("", "kernels"), ("_bias", "biases"))
        ),
        Pair(f"{_EXPERTS}.down_proj", f"{_BRANCH}.narrow.kernels"),
        Pair(f"{_EXPERTS}.down_proj_bias", f"{_BRANCH}.narrow.biases"),
    )
    head_dim = 64

    def read_more(self, settings: Settings, fields: Fields, length: int | None) -> dict[str, Any]:
        inherited = super().read_more(settings, fields, length)
        # As the first release says them once more.
        demand_same(settings, "experts_per_token", fields["experts_per_token"], "num_experts_per_tok")
        trained = getattr(inherited["rotary_scaling"], "trained_length", fields["max_length"])
        demand_same(settings, "initial_context_length", trained, "the rotary rule")
        sliding = [layer % 2 == 0 for layer in range(fields["num_layers"])]
        return {
            **inherited,
            "gate_limit": read_number("swiglu_limit", settings.get("swiglu_limit", 7.0)),
            "windows": read_windows(settings, settings.get("sliding_window", 128), sliding),
        }

    def write_more(self, config: TransformerConfig) -> dict[str, Any]:
        activation = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": config.gate_limit}
        return {**super().write_more(config), **write_windows(config, unused=128), **activation}

    def read_positions(self, settings: Settings, *sizes: Any) -> dict[str, Any]:
        says = any(settings.get(name) for name in ("rope_parameters", "rope_scaling"))
        rope = settings if says else {"rope_theta": settings.get("rope_theta"), "rope_scaling": _YARN}
        return read_rotary(rope, *sizes, default_base=150_000.0)

    def unpack(self, weights: WeightFiles) -> WeightFiles:
        return _Unpacked(weights)


class _Unpacked(WeightFiles):
    """Tensors of which pairs of packed ones, blocks and scales, are one of bfloat16, which has all digits."""

    def __init__(self, packed: WeightFiles):
        super().__init__(packed, packed.handles)
        self.packed = packed
        for name, blocks in packed.items():
            name, end, _ = name.partition("_blocks")
            scales = packed.get(f"{name}_scales")
            if not end or scales is None or blocks.shape != (*scales.shape, 16) or len(scales.shape) != 3:
                continue
            num_experts, width, groups = scales.shape
            self[name] = Stored(blocks.path, (num_experts, 32 * groups, width), "BF16")
            del self[f"{name}_blocks"], self[f"{name}_scales"]

    def read(self, name: str) -> np.ndarray:
        if name in self.packed or name not in self:
            return super().read(name)
        return unpack_mxfp4(self.packed.read(f"{name}_blocks"), self.packed.read(f"{name}_scales"))


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the matrices `(E, in, out)` that blocks `(E, out, in / 32, 16)` and their scales stand for.

    A byte of a block holds two numbers, the low half first; a scale, the exponent of 32 numbers, plus 127.

    Reference: Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023, section 5.
    """
    halves = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    exponents = np.arange(256, dtype=np.int32)[:, None] - 127
    with np.errstate(over="ignore"):  # to infinity, which is refused where it is read
        numbers = np.ldexp(np.concatenate([halves, -halves]), exponents).astype(ml_dtypes.bfloat16)
    numbers[255] = np.nan
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    return numbers[scales[..., None], codes].reshape(*scales.shape[:2], -1).swapaxes(1, 2)
