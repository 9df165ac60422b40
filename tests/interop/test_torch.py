"""Converters against PyTorch itself. Run by hand: pip install torch==2.13.0, then pytest -m torch."""

import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks
from regard.interop import torch_sdpa

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
def test_masks_mean_what_multi_head_attention_of_torch_means(per_head):
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


def test_attend_reads_a_boolean_mask_as_torch_does():
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["plain", "causal", "boolean", "added", "both", "one key head", "rank 3", "rank 2"]
)
def test_the_adapter_agrees_with_torch(name, dtype):
    torch.manual_seed(2)
    query, key, value = (torch.randn(2, n, m, 7) for n, m in ((6, 5), (3, 11), (3, 11)))
    keep = torch.rand(6, 5, 11) < 0.6
    keep[:, 1] = False  # an empty row
    added = torch.where(keep, torch.randn(6, 5, 11), -torch.inf).to(dtype)
    kwargs = {
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": keep, "scale": 0.3},
        "added": {"attn_mask": added},
        "both": {"attn_mask": keep, "is_causal": True},
    }.get(name, {})
    if name == "one key head":
        key, value = key[:, :1], value[:, :1]
    elif name == "rank 3":
        query, key, value = query[0], key[0], value[0]
    elif name == "rank 2":
        query, key, value = query[0, 0], key[0, 0], value[0, 0]
    if name not in ("one key head", "rank 2"):
        kwargs["enable_gqa"] = True
    arrays = [x.to(dtype) for x in (query, key, value)]
    asked = kwargs
    if name == "both":  # of which some of torch's kernels make an error
        asked = {"attn_mask": keep.tril(), "enable_gqa": True}
    theirs = torch.nn.functional.scaled_dot_product_attention(*arrays, **asked).float().numpy()
    ours_kwargs = {k: _to_jax(v) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    ours = torch_sdpa.scaled_dot_product_attention(*map(_to_jax, arrays), **ours_kwargs)
    assert str(ours.dtype) == str(dtype).removeprefix("torch.")
    atol = 1e-6 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(ours.astype("float32"), theirs, atol=atol)


def test_the_adapter_refuses_what_torch_refuses():
    query, key = torch.randn(2, 6, 5, 7), torch.randn(2, 3, 5, 7)
    wrong = [((query, key, key), {}), ((query, query, query), {"attn_mask": torch.ones(5, 5).int()})]
    wrong += [((query, query, query), {"attn_mask": torch.ones(5, 7).bool()})]
    for arrays, kwargs in wrong:
        with pytest.raises(RuntimeError):
            torch.nn.functional.scaled_dot_product_attention(*arrays, **kwargs)
        ours = {name: _to_jax(value) for name, value in kwargs.items()}
        with pytest.raises((TypeError, ValueError)):
            torch_sdpa.scaled_dot_product_attention(*map(_to_jax, arrays), **ours)


def _to_jax(tensor):
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.numpy())
