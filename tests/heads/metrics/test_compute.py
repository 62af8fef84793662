"""Metrics of weights with known results (uniform, one-hot, previous token, blocks), and memory for long sequences."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attend.attention import rows
from attend.attention.call import top_k
from attend.attention.initialization import draw_weights
from attend.attention.layer import MultiHeadAttention
from attend.attention.masks import Masks
from attend.heads.metrics.compute import OF_WEIGHTS, MetricsOperation
from attend.heads.metrics.rows import MetricsOptions, StrongestLinks
from attend.spec import LayerSpec
from support.calls import call_of

N = 7
WORDS = torch.tensor([[0, 1, 2, 0, 1, 3, 0]])


def layer_of(**spec: Any) -> MultiHeadAttention:
    layer_spec = LayerSpec(**spec)
    weights = {name: torch.from_numpy(array) for name, array in draw_weights(layer_spec).items()}
    return MultiHeadAttention(layer_spec, weights, torch.device("cpu"))


def metrics_of(weights: np.ndarray[Any, Any], *names: str, **options: Any) -> dict[str, torch.Tensor]:
    """The metrics of attention weights [h, n, n]. They are the bias of a layer without projections, as logarithms."""
    heads, n, _ = weights.shape
    layer = layer_of(d_model=heads * 2, num_heads=heads, projections=False, dtype="float64")
    zeros = torch.zeros(1, n, heads * 2, dtype=torch.float64)
    with np.errstate(divide="ignore"):
        bias = torch.from_numpy(np.log(weights))[None]
    masks = Masks(torch.arange(n)[None], n, bias=bias, bias_blocks=bool((bias == -torch.inf).any()), aligned=True)
    operation = MetricsOperation(MetricsOptions(tuple(names), query_tokens=WORDS, key_tokens=WORDS, **options))
    return operation.run(layer, call_of(zeros, zeros, zeros, masks, 1.0, frozenset())).tensors


UNIFORM = np.full((N, N), 1 / N)
SELF = np.eye(N)
PREVIOUS = np.eye(N, k=-1) + np.eye(N) * (np.arange(N) == 0)
FIRST = np.zeros((N, N)) + (np.arange(N) == 0)
BLOCKS = np.kron(np.eye(2), np.ones((4, 4)) / 4)[:N, :N] / np.array([1] * 4 + [0.75] * 3)[:, None]
PATTERNS = np.stack([UNIFORM, SELF, PREVIOUS, FIRST, BLOCKS])
DISTANCES = np.abs(np.arange(N)[:, None] - np.arange(N))
KNOWN = {
    "entropy": [math.log(N), 0, 0, 0, (4 * math.log(4) + 3 * math.log(3)) / N],
    "normalised_entropy": [1, np.nan, np.nan, np.nan, 1],  # of the keys that the bias leaves a row
    "confidence": [1 / N, 1, 1, 1, (4 / 4 + 3 / 3) / N],
    "keys_for_mass": [N, 1, 1, 1, (4 * 4 + 3 * 3) / N],
    "first_key_mass": [1 / N, 1 / N, 2 / N, 1, 1 / N],
    "self_share": [1 / N, 1, 1 / N, 1 / N, 2 / N],
    "mean_distance": [DISTANCES.mean(), 0, (N - 1) / N, DISTANCES[0].mean(), (1.25 * 4 + 8 / 9 * 3) / N],
    "global_share": [(DISTANCES > 2).mean(), 0, 0, (N - 3) / N, 2 * 0.25 / N],
}


@pytest.mark.parametrize("name", KNOWN)
def test_metrics_of_known_patterns(name: str) -> None:
    """Uniform weights, and weight on the own position, the previous, the first, and two blocks."""
    np.testing.assert_allclose(metrics_of(PATTERNS, name, mass=0.95)[name][0], KNOWN[name], rtol=1e-12, atol=1e-12)


def test_pattern_scores_are_1_on_their_pattern() -> None:
    """And the expected share on uniform weights."""
    soft = 0.999 * PREVIOUS + 0.001 * UNIFORM
    visible = np.tril(np.ones((N, N)))
    duplicate, induction = (np.zeros((N, N)) for _ in range(2))
    for i, j in ((3, 0), (4, 1), (6, 3)):
        duplicate[i, j], induction[i, j + 1] = 1, 1
    rest = 1 - duplicate.sum(1, keepdims=True)
    causal = visible / visible.sum(1, keepdims=True)
    heads = np.stack([soft, duplicate + rest * causal, induction + rest * causal, causal]) * 0.999 + 0.001 * causal

    metrics = metrics_of(heads, "previous_token_score", "duplicate_token_score", "induction_score")

    assert metrics["previous_token_score"][0, 0] > 0.99
    assert metrics["duplicate_token_score"][0, 1] > 0.99
    assert metrics["induction_score"][0, 2] > 0.99
    np.testing.assert_allclose(metrics["duplicate_token_score"][0, 3], (1 / 4 + 1 / 5 + 2 / 7) / 3, rtol=1e-9)
    np.testing.assert_allclose(metrics["previous_token_score"][0, 3], np.mean([1 / n for n in range(2, N + 1)]), rtol=1e-9)


def test_similarity_of_equal_and_of_disjoint_heads() -> None:
    """Equal heads: cosine 1, divergence 0, deviation 0; heads that share no key: 0 and ln 2."""
    names = ("cosine_similarity", "jensen_shannon", "position_disagreement", "deviation_across_heads")
    alike, apart = metrics_of(np.stack([UNIFORM, UNIFORM]), *names), metrics_of(np.stack([SELF, np.roll(SELF, 1, 1)]), *names)

    np.testing.assert_allclose(alike["cosine_similarity"][0], np.ones((2, 2)), rtol=1e-12)
    np.testing.assert_allclose(alike["jensen_shannon"][0], np.zeros((2, 2)), atol=1e-12)
    np.testing.assert_allclose(alike["deviation_across_heads"][0], np.zeros(N), atol=1e-12)
    np.testing.assert_allclose(alike["position_disagreement"], [-1 / N], rtol=1e-12)
    np.testing.assert_allclose(apart["cosine_similarity"][0], np.eye(2), atol=1e-12)
    np.testing.assert_allclose(apart["jensen_shannon"][0], math.log(2) * (1 - np.eye(2)), rtol=1e-12)
    np.testing.assert_allclose(apart["position_disagreement"], [-0.5], rtol=1e-12)
    np.testing.assert_allclose(apart["deviation_across_heads"][0], np.full(N, 0.5), rtol=1e-12)


def test_ties_go_to_the_lower_index() -> None:
    """Within and across blocks; torch may choose any."""
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0], [0.0] * 7])
    pair = np.where(np.arange(N)[:, None] == 3, (SELF + np.eye(N, k=1)) / 2, SELF)  # row 3 has two equal weights, others see one key
    links = metrics_of(np.stack([UNIFORM, pair]), "strongest_links", top_links=9)

    assert top_k(values, 5)[1].tolist() == [[1, 3, 6, 2, 4], [0, 1, 2, 3, 4]]
    assert top_k(values, 0)[1].shape == (2, 0)
    assert links["strongest_links.queries"].tolist() == [[[0] * N + [1] * 2, [3, 3] + [-1] * N]]
    assert links["strongest_links.keys"].tolist() == [[[*range(N), 0, 1], [3, 4] + [-1] * N]]
    assert StrongestLinks(3).n == 3


def test_rows_that_see_one_key_have_no_links() -> None:
    """The first row of a causal head has a weight of 1 for any scores; the largest weight of the others is the strongest link."""
    rows = np.tril(np.random.default_rng(5).random((N, N)))
    weights = rows / rows.sum(1, keepdims=True)
    links = metrics_of(np.stack([weights, SELF]), "strongest_links", top_links=1)

    best = np.unravel_index(np.argmax(weights[1:]), (N - 1, N))
    assert links["strongest_links.queries"].tolist() == [[[best[0] + 1], [-1]]]
    assert links["strongest_links.keys"].tolist() == [[[best[1]], [-1]]]
    np.testing.assert_allclose(links["strongest_links.weights"][0, 0], weights[1:].max())


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 12), levels=st.sampled_from([2, 5, 1000]), nan=st.booleans())
def test_top_k_is_the_beginning_of_a_stable_sort(seed: int, n: int, levels: int, nan: bool) -> None:
    """With many ties, few and none; NaN counts as the largest."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, levels, (3, 2, 30))).double()
    if nan:
        values[0, 1, 7] = torch.nan
    largest, indices = top_k(values, n)
    wanted = torch.sort(values, dim=-1, descending=True, stable=True)
    np.testing.assert_array_equal(largest, wanted.values[..., :n])
    np.testing.assert_array_equal(indices, wanted.indices[..., :n])


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        metrics = function(*args, **(kwargs or {}))
        for tensor in metrics if isinstance(metrics, tuple | list) else [metrics]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return metrics


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch, since several threads slow down many small steps on shared cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_weights_of_a_long_sequence_are_computed_in_blocks() -> None:
    """1 x 2048 x 64 with 8 heads: no tensor has more than 16 MB, while all weights have 128 MB."""
    layer, n = layer_of(d_model=64, num_heads=8), 2048
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((1, n, 64), np.float32))
    words = torch.arange(n)[None] % 50
    names = {"entropy", "strongest_links", "mean_distance", "induction_score", "cosine_similarity"}
    others = {"zero_ablation", "pruning_order", "output_disagreement", "subspace_disagreement", "value_norms"}
    options = MetricsOptions((*names, *others), query_tokens=words, key_tokens=words)
    call = call_of(x, x, x, Masks(torch.arange(n)[None], n, right=0, aligned=True), 8**-0.5, frozenset())

    with Largest() as watched:
        result = MetricsOperation(options).run(layer, call)

    assert 4 * 8 * n * n == 1 << 27
    assert watched.largest <= 1 << 24
    assert torch.isfinite(result.tensors["entropy"]).all()


def test_metrics_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every metric is the same with blocks of one row and with one block."""
    rng = np.random.default_rng(8)
    layer = layer_of(d_model=12, num_heads=6, num_kv_heads=2, dtype="float64")
    x = torch.from_numpy(rng.standard_normal((2, N, 12)))
    masks = Masks(torch.arange(N)[None], N, lengths=torch.tensor([[N], [4]]), right=1, aligned=True)
    names = (*OF_WEIGHTS, "zero_ablation")
    call = call_of(x, x, x, masks, 2**-0.5, frozenset())
    options = MetricsOptions(names, query_tokens=WORDS, key_tokens=WORDS)
    whole = MetricsOperation(options).run(layer, call).tensors

    monkeypatch.setattr(rows, "MAX_BLOCK_SCORES", 1)
    pieces = MetricsOperation(options).run(layer, call).tensors

    assert set(whole) == set(pieces)
    for name, tensor in whole.items():
        np.testing.assert_allclose(pieces[name], tensor, rtol=1e-9, atol=1e-12, err_msg=name)


def test_gradient_importance_agrees_with_autograd() -> None:
    """By a factor on each head's output, of half the squared norm and of a direction."""
    rng = np.random.default_rng(9)
    layer = layer_of(d_model=12, num_heads=3, dtype="float64", init="torch_linear")
    x, direction = (torch.from_numpy(rng.standard_normal((2, N, 12))) for _ in range(2))
    for toward in (None, direction):
        call = call_of(x, x, x, Masks(torch.arange(N)[None], N), 0.5, frozenset({"head_outputs"}))
        heads = layer.forward(call).tensors["head_outputs"].clone()
        factor = torch.ones(2, 3, 1, 1, dtype=torch.float64, requires_grad=True)
        output = torch.nn.functional.linear(
            (heads * factor).transpose(1, 2).flatten(2), layer.weights["output.weight"].clone(), layer.weights["output.bias"].clone()
        )
        loss = (output.square() / 2).sum() if toward is None else (output * toward).sum()
        (gradient,) = torch.autograd.grad(loss, factor)

        options = MetricsOptions(("contribution", "gradient_importance"), direction=toward)
        metrics = MetricsOperation(options).run(layer, call_of(x, x, x, call.masks, 0.5, frozenset())).tensors

        gradient = gradient[..., 0, 0]
        np.testing.assert_allclose(metrics["contribution"], gradient, rtol=1e-10)
        np.testing.assert_allclose(metrics["gradient_importance"], gradient.abs() / gradient.norm(dim=1, keepdim=True), rtol=1e-10)
