"""Layers on a device that is no CPU: it computes the same numbers, and calls seldom wait for it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attend.attention import cache, decoding
from attend.attention.call import Call
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.attention.operations import FORWARD
from attend.attention.operators import OPERATORS
from attend.attention.operators.operator import Operator
from attend.check.random_cases import Case
from attend.serving.calls import make_call
from attend.wire.problems import validate
from attend.wire.schemas.attend import AttendRequest
from support import pretended_device
from support.cases import weights_of
from support.layers import call_of, make, rows_masks
from support.operator_cases import case_with

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def without_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices in Python do not know it."""
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else torch.enable_grad())
    for owner in (cache, decoding):
        for holder in (owner, *(x for x in vars(owner).values() if isinstance(x, type) and x.__module__ == owner.__name__)):
            for name, function in [*vars(holder).items()]:
                if hasattr(function, "__wrapped__") and not isinstance(function, type):
                    monkeypatch.setattr(holder, name, function.__wrapped__)


def layers_of(case: Case) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """On the CPU, and elsewhere."""
    device, weights = (
        pretended_device.device(),
        {name: torch.from_numpy(np.asarray(x, case.spec.dtype)) for name, x in weights_of(case).items()},
    )
    there = {name: x.to(device) for name, x in weights.items()}
    return MultiHeadAttention(case.spec, weights, CPU), MultiHeadAttention(case.spec, there, device)


def call_from(case: Case, *outputs: str) -> Call:
    return make_call(validate(AttendRequest, {**case.request, "outputs": list(outputs)}), case.spec)


def agree(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        torch.testing.assert_close(pretended_device.held(got[name]), expected, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@settings(max_examples=settings.default.max_examples // 6)  # a device in Python is slow
@given(seed=SEEDS)
def test_calls_of_every_operator_are_computed_elsewhere(operator: type[Operator], seed: int) -> None:
    """All outputs, and the output alone, which kernels may compute. No operation mixes tensors of two devices."""
    case = case_with(operator, seed)
    here, there = layers_of(case)
    outputs = [name for name in ("output", "attention_weights", "scores", "log_sum_exp", "key_projection") if name in case.spec.outputs()]
    for wanted in (outputs, ["output"]):
        call = call_from(case, *wanted)
        with pretended_device.Counting():
            got = there.forward(call.to(there.device)).tensors
        agree(got, here.forward(call).tensors)


def test_batches_selections_and_steps_of_sessions_are_computed_elsewhere() -> None:
    here, _ = make(d_model=24, num_heads=4, num_kv_heads=2, rope={}, alibi=True, dtype="float64")
    there = MultiHeadAttention(here.spec, {n: x.to(pretended_device.device()) for n, x in here.weights.items()}, pretended_device.device())
    calls = [call_of(here, items, 7, seed=items, masks=rows_masks(7, right=0, aligned=True)) for items in (1, 3)]
    for got, wanted in zip(*(FORWARD.run_batch(layer, [(FORWARD, call) for call in calls]) for layer in (there, here)), strict=True):
        agree(got.tensors, wanted.tensors)
    for options in ({"heads": (3, 0)}, {"queries": (5, 2)}, {"top_k": 2}, {"average": True}):
        chosen = calls[1].with_options(outputs=frozenset({"attention_weights"}), **options)
        agree(there.forward(chosen.to(there.device)).tensors, here.forward(chosen).tensors)
    results = []
    for layer in (there, here):
        rows = cache.KeyValueCache(layer.spec, cache.PagePool(layer.device), "someone")
        for n in range(3):
            masks = Masks(torch.tensor([[n]]), n + 1, right=0)
            row = call_of(here, 1, 1, seed=n, outputs=frozenset({"output"}), masks=masks).with_options(num_keys=n + 1)
            rows.reserve(n + 1)
            (result,) = decoding.forward_cached(layer, [(decoding.CachedForwardPass(rows, n), row.to(layer.device))])
        results.append(result.tensors)
    agree(*results)


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"right": 0},
    "window": {"left": 3},
    "lengths": {"lengths": torch.tensor([[3], [5]])},
    "mask": {"attend_mask": torch.ones(2, 1, 7, 7, dtype=torch.bool)},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("outputs", [{"output"}, {"output", "attention_weights"}], ids=len)
@pytest.mark.parametrize("layer", [{}, {"rope": {}, "alibi": True}, {"sinks": True, "softcap": 3.0}, {"qk_norm": {}}], ids=str)
def test_a_call_waits_at_most_twice(masks: str, outputs: set[str], layer: dict[str, Any]) -> None:
    """For whether rows are fully masked, and whether the outputs are finite; however many scores there are."""
    device = pretended_device.device()
    here, _ = make(d_model=24, num_heads=4, **layer)
    there = MultiHeadAttention(here.spec, {name: x.to(device) for name, x in here.weights.items()}, device)
    call = call_of(here, 2, 7, outputs=frozenset(outputs), masks=rows_masks(7, aligned=True, **MASKS[masks])).to(device)
    with pretended_device.Counting() as counted:
        there.forward(call)
    assert counted.waits.total() <= 2, counted.waits


def test_a_device_computes_many_scores_in_one_round() -> None:
    device = pretended_device.device()
    here, _ = make(d_model=24, num_heads=4)
    there = MultiHeadAttention(here.spec, {name: x.to(device) for name, x in here.weights.items()}, device)
    started = []
    for rows in (7, 700):  # 2 million scores: two blocks on a CPU
        with pretended_device.Counting() as counted:
            there.forward(call_of(here, 1, rows, outputs=frozenset({"output", "attention_weights"})).to(device))
        started.append(counted.operations)
    assert started[0] == started[1]
