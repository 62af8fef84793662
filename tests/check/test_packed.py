"""Functions that take several arrays in one, functions that torch.jit.script compiled, and refusals that name what to pass."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attend.check import compare


def attention_of(query: Any, key: Any, value: Any, causal: bool = False) -> Any:
    """Attention of heads [b, h, n, d]."""
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    scores = np.where(np.tri(scores.shape[-1], dtype=bool) | (not causal), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def split_of(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3)


def merged(x: Any) -> Any:
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], -1)


def rows_first(qkv: Any, causal: bool = False) -> Any:
    return attention_of(*np.moveaxis(qkv, 2, 0).swapaxes(2, 3), causal).swapaxes(1, 2)


def heads_first(qkv: Any) -> Any:
    return attention_of(*np.moveaxis(qkv, 1, 0))


def packed_weights(x: Any, w_qkv: Any, b_qkv: Any, w_out: Any, num_heads: int) -> Any:
    return merged(attention_of(*(split_of(part, num_heads) for part in np.split(x @ w_qkv + b_qkv, 3, -1)))) @ w_out


def packed_keys(x: Any, W_q: Any, W_kv: Any, W_o: Any, num_heads: int) -> Any:
    parts = (x @ W_q.T, *np.split(x @ W_kv.T, 2, -1))
    return merged(attention_of(*(split_of(part, num_heads) for part in parts))) @ W_o.T


RIGHT = {"rows": rows_first, "heads": heads_first, "weights": packed_weights, "weights of keys": packed_keys}


@pytest.mark.parametrize("name", RIGHT)
def test_functions_that_take_several_arrays_in_one_agree(name: str) -> None:
    report = compare(RIGHT[name], longest=17)
    assert report.agrees and report.is_complete, report


def test_what_is_wrong_with_packed_inputs_is_named() -> None:
    def unscaled(qkv: Any, causal: bool = False) -> Any:
        return rows_first(qkv * np.array([qkv.shape[-1] ** 0.5, 1, 1])[:, None, None], causal)

    assert compare(unscaled, longest=7).first.mistakes == ("the scores are not divided by sqrt(head_dim)",)  # type: ignore[union-attr]

    def ahead(qkv: Any, causal: bool = False) -> Any:
        return rows_first(qkv, False)

    assert compare(ahead, longest=7).first.case == "causal mask"  # type: ignore[union-attr]


def test_an_unknown_order_is_asked_about_and_not_wrong() -> None:
    def numbers_last(qkv: Any) -> Any:
        return attention_of(*np.moveaxis(qkv.reshape(*qkv.shape[:2], -1, 3, qkv.shape[-1]), 3, 0).swapaxes(2, 3)).swapaxes(1, 2)

    def per_head(x: Any, w_qkv: Any, w_out: Any, num_heads: int) -> Any:
        parts = np.moveaxis((x @ w_qkv).reshape(*x.shape[:2], num_heads, 3, -1), 3, 0).swapaxes(2, 3)
        return merged(attention_of(*parts)) @ w_out

    for candidate, name in ((numbers_last, "qkv"), (per_head, "w_qkv")):
        with pytest.raises(ValueError, match=f"ambiguous: the order in {name}, which is neither .* takes them apart"):
            compare(candidate, longest=7)


def masked(query, key, value, attn_mask: torch.Tensor | None = None, causal: bool = False):  # type: ignore[no-untyped-def]
    scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask, -float("inf"))
    if causal:
        scores = scores + torch.full([query.size(2), key.size(2)], -float("inf")).triu(1)
    return scores.softmax(-1) @ value


def test_the_parameters_of_a_scripted_function_are_those_of_its_schema() -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        scripted = torch.jit.script(masked)
    report = compare(scripted, longest=7)
    assert report.agrees and {"attn_mask", "causal"} <= {*report.tried}, report


class Gated(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj = (nn.Linear(d_model, d_model) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        output: torch.Tensor = self.o_proj(heads * self.gate_proj(x).sigmoid())
        return output


def test_a_refusal_names_the_field_of_the_spec_to_pass() -> None:
    with pytest.raises(ValueError, match=r"found gate.weight, gate.bias, .*: pass a spec with output_gate, or weights="):
        compare(Gated)
    spec: dict[str, Any] = {"d_model": 12, "num_heads": 3, "output_gate": {"bias": True}}
    assert compare(Gated, spec=spec, longest=7).agrees  # type: ignore[arg-type]
    biases = {"query": False, "key": False, "value": False, "output": True}
    with pytest.raises(ValueError, match=r"found no weight of output.bias: .* or a spec with another bias$"):
        compare(packed_keys, spec={"d_model": 12, "num_heads": 3, "bias": biases}, orientation="out,in")  # type: ignore[arg-type]
