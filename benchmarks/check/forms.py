"""The implementations of `implementations/`: how each is called, and what it has to return according to `oracle.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from oracle import Array, Visible, attention, heads_of, rms_normed, rotated, side_by_side

HEADS, WIDTH = 3, 12
LENGTHS = (1, 2, 7, 17, 65, 130)
LONGEST = 513


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one call: lengths, and which keys are visible."""

    queries: int
    keys: int
    mode: str  # plain, mask, causal, cross, segments
    batch: int = 2

    def mask(self) -> Array:
        """[queries, keys], true where a query may attend."""
        if self.mode == "causal":
            return np.tril(np.ones((self.queries, self.keys), bool))
        if self.mode == "mask":
            drawn = np.random.default_rng(self.keys).random((self.queries, self.keys))
            return (drawn < 0.6) | (np.arange(self.keys) == 0)
        return np.ones((self.queries, self.keys), bool)

    def inputs(self, *widths: int) -> list[Array]:
        random = np.random.default_rng(self.queries)
        lengths = (self.queries, self.keys, self.keys)
        return [random.normal(size=(self.batch, n, width)) for n, width in zip(lengths, widths, strict=True)]


def cases(modes: str) -> Iterator[Case]:
    """Short calls of all modes first, since most mutants differ there; the longest call is of the first mode."""
    for n in LENGTHS:
        for mode in modes.split():
            yield Case(n, n + 3 if mode == "cross" else n, mode)
    yield Case(LONGEST, LONGEST, modes.split()[0], batch=1)


@dataclass(frozen=True, slots=True)
class Form:
    """An implementation. `call` returns outputs and what is expected; `tolerance` is relative to the largest number."""

    file: str
    name: str
    modes: str
    call: Callable[[Any, Case], Iterator[tuple[Any, Array]]]
    tolerance: float = 1e-4
    options: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] | None = None
    needs: str = "torch"


def numbers(x: Any) -> Array:
    return np.asarray(x.detach().double() if hasattr(x, "detach") else x, np.float64)


@cache
def _expected(case: Case, key: bytes, heads: int, kv_heads: int, causal: bool, theta: float) -> tuple[Array, Array]:
    q, k, v = _OPEN[key]
    mask = case.mask()

    def visible(b: int, i: int, j: int) -> bool:
        return bool(mask[i, j]) and (not causal or j <= i)

    if theta:
        q, k = rotated(q, theta), rotated(k, theta)
    return attention(q, k, v, visible)


_OPEN: dict[bytes, tuple[Array, Array, Array]] = {}


def expected(case: Case, q: Array, k: Array, v: Array, causal: bool = False, theta: float = 0.0) -> tuple[Array, Array]:
    """The oracle's output and weights of these heads, computed once for equal numbers."""
    key = b"".join(x.astype(np.float32).tobytes() for x in (q, k, v))
    _OPEN[key] = (q, k, v)
    return _expected(case, key, q.shape[1], k.shape[1], causal, theta)


def _torch_layer(namespace: dict[str, Any], name: str, *sizes: int) -> Any:
    import torch

    torch.manual_seed(0)
    layer = namespace[name](*sizes)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.4 + (parameter.dim() == 1))
    return layer.eval()


def _linear(layer: Any, x: Array) -> Array:
    y = x @ numbers(layer.weight).T
    return y if layer.bias is None else y + numbers(layer.bias)


def _tensors(*arrays: Array) -> list[Any]:
    import torch

    return [torch.tensor(x, dtype=torch.float32) for x in arrays]


def numpy_loops(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    layer = namespace["MultiHeadAttention"](WIDTH, HEADS)
    q, k, v = case.inputs(WIDTH, WIDTH, WIDTH)
    matrices = ((q, layer.W_q, layer.b_q), (k, layer.W_k, layer.b_k), (v, layer.W_v, layer.b_v))
    output, weights = expected(case, *(heads_of(x @ w + b, HEADS) for x, w, b in matrices))
    got = layer(q, k, v, None if case.mode in ("plain", "cross") else case.mask())
    yield got[0], side_by_side(output) @ layer.W_o + layer.b_o
    yield got[1], weights


def numpy_einsum(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    layer = namespace["EinsumAttention"](WIDTH, HEADS)
    q, k, v = case.inputs(WIDTH, WIDTH, WIDTH)
    heads = [np.stack([x @ w[h] for h in range(HEADS)], axis=1) for x, w in ((q, layer.w_q), (k, layer.w_k), (v, layer.w_v))]
    output, weights = expected(case, *heads)
    got = layer(q, k, v, None if case.mode in ("plain", "cross") else case.mask())
    yield got[0], sum(output[:, h] @ layer.w_o[h] for h in range(HEADS))  # type: ignore[misc]
    yield got[1], weights


def torch_function(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    import torch

    q, k, v = (heads_of(x, HEADS) for x in case.inputs(WIDTH, WIDTH, WIDTH))
    bias = torch.zeros(case.queries, case.keys).masked_fill(~torch.tensor(case.mask()), -torch.inf)
    got = namespace["attention"](*_tensors(q, k, v), None if case.mode in ("plain", "cross") else bias)
    yield from zip(got, expected(case, q, k, v), strict=True)


def textbook(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    layer = _torch_layer(namespace, "MultiHeadAttention", WIDTH, HEADS)
    q, k, v = case.inputs(WIDTH, WIDTH, WIDTH)
    output, weights = expected(case, *(heads_of(_linear(w, x), HEADS) for w, x in ((layer.W_q, q), (layer.W_k, k), (layer.W_v, v))))
    mask = None if case.mode in ("plain", "cross") else _tensors(case.mask())[0]
    got = layer(*_tensors(q, k, v), mask)
    yield got[0], _linear(layer.W_o, side_by_side(output))
    yield got[1], weights


def causal_gpt(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    layer = _torch_layer(namespace, "CausalSelfAttention", WIDTH, HEADS, LONGEST)
    x = case.inputs(WIDTH, WIDTH, WIDTH)[0]
    output, _ = expected(case, *(heads_of(part, HEADS) for part in np.split(_linear(layer.c_attn, x), 3, axis=2)), causal=True)
    yield layer(*_tensors(x)), _linear(layer.c_proj, side_by_side(output))


def llama(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    layer = _torch_layer(namespace, "Attention", WIDTH, 6, 2, 4)
    x = case.inputs(WIDTH, WIDTH, WIDTH)[0]
    q, k, v = (heads_of(_linear(w, x), h) for w, h in ((layer.q_proj, 6), (layer.k_proj, 2), (layer.v_proj, 2)))
    q, k = rms_normed(q, numbers(layer.q_norm.weight), 1e-6), rms_normed(k, numbers(layer.k_norm.weight), 1e-6)
    output, weights = expected(case, q, k, v, causal=True, theta=10000.0)
    got = layer(*_tensors(x))
    yield got[0], _linear(layer.o_proj, side_by_side(output))
    yield got[1], weights


def packed(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    import torch

    layer = _torch_layer(namespace, "PackedAttention", WIDTH, HEADS)
    x = case.inputs(WIDTH, WIDTH, WIDTH)[0]
    segments = np.sort(np.random.default_rng(case.keys).integers(1, 4, (case.batch, case.keys)), axis=1)
    q, k, v = (heads_of(part, HEADS) for part in np.split(_linear(layer.qkv, x), 3, axis=2))
    apart = case.mode == "segments"

    def visible(b: int, i: int, j: int) -> bool:
        return not apart or bool(segments[b, i] == segments[b, j])

    output, weights = _packed_expected(case, q, k, v, visible)
    got = layer(*_tensors(x), torch.tensor(segments) if apart else None)
    yield got[0], _linear(layer.out_proj, side_by_side(output))
    yield got[1], weights


_PACKED: dict[tuple[Case, bytes], tuple[Array, Array]] = {}


def _packed_expected(case: Case, q: Array, k: Array, v: Array, visible: Visible) -> tuple[Array, Array]:
    key = (case, b"".join(x.astype(np.float32).tobytes() for x in (q, k, v)))
    if key not in _PACKED:
        _PACKED[key] = attention(q, k, v, visible)
    return _PACKED[key]


def cached(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    """One call, and the same rows in two chunks of which the second gets the first one's cache."""
    layer = _torch_layer(namespace, "CachedAttention", WIDTH, HEADS)
    x = case.inputs(WIDTH, WIDTH, WIDTH)[0]
    heads = (heads_of(_linear(w, x), HEADS) for w in (layer.q_proj, layer.k_proj, layer.v_proj))
    right = _linear(layer.o_proj, side_by_side(expected(case, *heads, causal=True)[0]))
    rows, first = _tensors(x)[0], case.queries // 3
    yield layer(rows)[0], right
    if first:
        start, past = layer(rows[:, :first])
        yield start, right[:, :first]
        middle, past = layer(rows[:, first : first + 1], past)
        yield middle, right[:, first : first + 1]
        yield layer(rows[:, first + 1 :], past)[0], right[:, first + 1 :]


def jax_function(namespace: dict[str, Any], case: Case) -> Iterator[tuple[Any, Array]]:
    q, k, v = (heads_of(x, HEADS) for x in case.inputs(WIDTH, WIDTH, WIDTH))
    got = namespace["attention"](*(x.astype(np.float32) for x in (q, k, v)), None if case.mode in ("plain", "cross") else case.mask())
    yield from zip(got, expected(case, q, k, v), strict=True)


MASKED = "plain mask causal cross"
LLAMA = {
    "d_model": 24,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "bias": False,
    "rope": {"theta": 10000.0, "interleaved": False},
    "qk_norm": {"kind": "rms", "eps": 1e-6},
}
FORMS = (
    Form("numpy_loops.py", "MultiHeadAttention", MASKED, numpy_loops, 1e-10),
    Form("numpy_einsum.py", "EinsumAttention", MASKED, numpy_einsum, 1e-10),
    Form("torch_function.py", "attention", MASKED, torch_function, options={"framework": "torch", "mask_means": "add"}),
    Form("textbook.py", "MultiHeadAttention", MASKED, textbook, options={"mask_means": "attend"}),
    Form("causal_gpt.py", "CausalSelfAttention", "plain", causal_gpt, options={"causal": True}),
    Form("llama.py", "Attention", "plain", llama, options={"causal": True}, spec=LLAMA),
    Form("packed.py", "PackedAttention", "plain segments", packed, options={"fused": "q,k,v"}),
    Form("cached.py", "CachedAttention", "plain", cached, options={"causal": True}),
    Form("jax_function.py", "attention", MASKED, jax_function, options={"framework": "jax"}, needs="jax"),
)


def is_right(form: Form, source: str, up_to: int = LONGEST) -> bool:
    """Whether the source returns the oracle's numbers in all cases of up to so many keys. What it raises is raised."""
    namespace: dict[str, Any] = {"__name__": form.file.removesuffix(".py")}
    exec(compile(source, form.file, "exec"), namespace)
    for case in (case for case in cases(form.modes) if case.keys <= up_to):
        for got, right in form.call(namespace, case):
            array = numbers(got)
            if array.shape != right.shape or not np.abs(array - right).max(initial=0) <= form.tolerance * np.abs(right).max(initial=0):
                return False
    return True
