"""Converters against PyTorch itself. Run by hand: pip install torch==2.13.0, then pytest -m torch."""

import numpy as np
import pytest

from regard import attend, masks

torch = pytest.importorskip("torch", reason="torch is compared with by hand", exc_type=ImportError)
pytestmark = pytest.mark.torch


def heads(module, x):
    """torch's projected query, key and value as (batch, heads, length, width)."""
    batch, length, _ = x.shape
    parts = (x @ module.in_proj_weight.T + module.in_proj_bias).reshape(
        batch, length, 3, module.num_heads, -1
    )
    return [part.detach().numpy() for part in parts.permute(2, 0, 3, 1, 4)]


@pytest.mark.parametrize("per_head", [False, True])
def test_multi_head_attention_masks(per_head):
    torch.manual_seed(0)
    batch, length, width, num_heads = 2, 5, 12, 3
    module = torch.nn.MultiheadAttention(width, num_heads, batch_first=True).eval()
    x = torch.randn(batch, length, width)
    drop = torch.rand(*((batch * num_heads,) if per_head else ()), length, length) < 0.3
    drop[..., 0] = False
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    with torch.no_grad():
        theirs, weights = module(
            x, x, x, attn_mask=drop, key_padding_mask=padding, average_attn_weights=False
        )
    mask = masks.from_torch_mha(drop.numpy(), padding.numpy(), num_heads=num_heads)
    out, aux = attend(*heads(module, x), mask=mask, aux=("weights",))
    np.testing.assert_allclose(aux["weights"], weights.numpy(), atol=2e-7)
    merged = torch.tensor(np.asarray(out)).permute(0, 2, 1, 3).reshape(batch, length, width)
    with torch.no_grad():
        np.testing.assert_allclose(module.out_proj(merged).numpy(), theirs.numpy(), atol=1e-6)


def test_scaled_dot_product_attention_and_its_boolean_mask():
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 6, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    keep = torch.rand(2, 1, 5, 11) < 0.6
    keep[..., 0] = True
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, keep, enable_gqa=True)
    ours = attend(query.numpy(), key.numpy(), value.numpy(), mask=keep.numpy())
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)
    causal = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    ours = attend(query.numpy(), key.numpy(), value.numpy(), mask=masks.causal(), query_offset=0)
    np.testing.assert_allclose(ours, causal.numpy(), atol=1e-6)
