"""torch's fused kernels store no number for each query and key, whatever the widths of keys and values."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attend.attention.initialization import draw_weights
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.spec import LayerSpec
from support.calls import call_of

ROWS = 151


@pytest.mark.parametrize(("value_head_dim", "kv_heads"), [(5, 3), (11, 1)])
def test_causal_calls_store_no_scores(value_head_dim: int, kv_heads: int) -> None:
    spec = LayerSpec(d_model=13, num_heads=3, num_kv_heads=kv_heads, head_dim=7, value_head_dim=value_head_dim)
    layer = MultiHeadAttention(spec, {name: torch.from_numpy(array) for name, array in draw_weights(spec).items()}, torch.device("cpu"))
    x = torch.randn(1, ROWS, 13, generator=torch.Generator().manual_seed(0))
    call = call_of(x, x, x, Masks(torch.arange(ROWS)[None], ROWS, right=0, aligned=True), spec.scale, frozenset({"output"}))

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        output = layer.forward(call).tensors["output"]

    scores = 4 * spec.num_heads * ROWS * ROWS  # bytes; torch stores those of a few rows at a time for each thread
    assert max(event.self_cpu_memory_usage for event in profiled.events()) < scores
    exact = layer.forward(call.with_options(reproducible=True)).tensors["output"]
    assert (output - exact).abs().max() < 2e-6 * exact.abs().max()
