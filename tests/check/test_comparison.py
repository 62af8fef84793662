"""`compare`: correct candidates agree in every convention, and the mistakes of others are named."""

import functools
import itertools
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attend.check import assert_agrees, compare, tolerance
from attend.check.cases import CaseKind, Draw, draw_long_cases, draw_short_cases, lengths_for
from attend.check.changes import Impossible
from attend.check.comparison import Comparison
from attend.check.computation import Computation
from attend.check.explanation import Observation, explain
from attend.check.mistakes import MISTAKES
from attend.check.parameters import draw_parameter_cases
from attend.check.random_cases import Draw as DrawValues
from attend.check.random_cases import draw_weights
from attend.spec import LayerSpec

# --- correct candidates, in the conventions of books and libraries ----------------------------------------------------------------------


def split(x, heads):
    b, n, width = x.shape
    return x.view(b, n, heads, width // heads).transpose(1, 2)


def merge(x):
    b, h, n, d = x.shape
    return x.transpose(1, 2).reshape(b, n, h * d)


def scaled_dot_product(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


class FromScratch(nn.Module):
    """Four linear layers, mask 1 = attend."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        q, k, v = (split(layer(x), self.num_heads) for layer, x in ((self.W_q, query), (self.W_k, key), (self.W_v, value)))
        heads, weights = scaled_dot_product(q, k, v, mask)
        return self.W_o(merge(heads)), weights


class Annotated(nn.Module):
    """The Annotated Transformer: a list of four layers, and a mask without its head axis."""

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        q, k, v = (split(layer(x), self.h) for layer, x in zip(self.linears, (query, key, value), strict=False))
        return self.linears[-1](merge(scaled_dot_product(q, k, v, mask)[0]))


class DiveIntoDeepLearning(nn.Module):
    """Lazy layers, valid lengths, no bias."""

    def __init__(self, num_hiddens, num_heads, dropout, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.LazyLinear(num_hiddens, bias=bias) for _ in range(4))

    def forward(self, queries, keys, values, valid_lens):
        q, k, v = (split(layer(x), self.num_heads) for layer, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values)))
        mask = None if valid_lens is None else (torch.arange(k.shape[2]) < valid_lens[:, None])[:, None, None]
        return self.W_o(merge(scaled_dot_product(q, k, v, mask)[0]))


class CausalSelfAttention(nn.Module):
    """nanoGPT: one packed matrix, a buffer that is called bias, always causal."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)))

    def forward(self, x):
        q, k, v = (split(part, self.n_head) for part in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(merge(scaled_dot_product(q, k, v, self.bias[: x.shape[1], : x.shape[1]])[0]))


class FromTheBook(nn.Module):
    """Build a Large Language Model (From Scratch): d_in, d_out, context_length, always causal."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(d_out, d_out)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        q, k, v = (split(layer(x), self.num_heads) for layer in (self.W_query, self.W_key, self.W_value))
        return self.out_proj(merge(scaled_dot_product(q, k, v, 1 - self.mask[: x.shape[1], : x.shape[1]])[0]))


class PackedPerHead(nn.Module):
    """The UvA tutorial: q, k and v of one head are adjacent; an argument requests the weights."""

    def __init__(self, input_dim, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None, return_attention=False):
        b, n, _ = x.shape
        q, k, v = self.qkv_proj(x).reshape(b, n, self.num_heads, -1).permute(0, 2, 1, 3).chunk(3, dim=-1)
        heads, weights = scaled_dot_product(q, k, v, mask)
        output = self.o_proj(merge(heads))
        return (output, weights) if return_attention else output


class Head(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(n_embd, head_size, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        return scaled_dot_product(q, k, v, torch.tril(torch.ones(x.shape[1], x.shape[1])))[0][:, 0]


class ListOfHeads(nn.Module):
    """Karpathy's lecture: each head is a module."""

    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(num_heads * head_size, head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(num_heads * head_size, num_heads * head_size)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Context(nn.Module):
    """Cross-attention to one context, true = blocked, float64."""

    def __init__(self, dim, heads=8, dim_head=64):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, heads * dim_head, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))
        self.double()

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = split(self.to_q(x), self.heads), split(self.to_k(context), self.heads), split(self.to_v(context), self.heads)
        return self.to_out(merge(scaled_dot_product(q, k, v, None if mask is None else ~mask)[0]))


class Bare(nn.Module):
    """Matrices without layers, applied as x @ W; query, value, key in Keras's order; an added mask."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Parameter(torch.randn(d_model, d_model)) for _ in range(4))

    def forward(self, query, value, key, attention_mask=None):
        q, k, v = (split(x @ w, self.num_heads) for x, w in ((query, self.w_q), (key, self.w_k), (value, self.w_v)))
        return merge(functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)) @ self.w_o


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class NumPyAttention:
    """x @ W, mask 1 = blocked."""

    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.default_rng(5).standard_normal((4, d_model, d_model))
        self.b_o = np.full(d_model, 0.5)

    def apply(self, x, W):
        return x @ W

    def split(self, x):
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)

    def forward(self, query, key, value, mask=None):
        q, k, v = (self.split(self.apply(x, W)) for x, W in ((query, self.W_q), (key, self.W_k), (value, self.W_v)))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(mask, -np.inf, scores)
        self.q = q  # an array of the last call, not a weight
        weights = softmax(scores)
        return self.apply((weights @ v).transpose(0, 2, 1, 3).reshape(query.shape), self.W_o) + self.b_o, weights


class NumPyTransposed(NumPyAttention):
    def apply(self, x, W):
        return x @ W.T


class NumPyOneSequence:
    """[n, d_model], one matrix per head, no output projection."""

    def __init__(self, d_model, n_heads):
        drawn = np.random.default_rng(6).standard_normal((3, n_heads, d_model, d_model // n_heads))
        self.params = dict(zip(("Wq", "Wk", "Wv"), drawn, strict=True))

    def __call__(self, x):
        q, k, v = (x @ self.params[name] for name in ("Wq", "Wk", "Wv"))  # [h, n, d]
        return np.concatenate(list(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v), axis=-1)


def numpy_function(Q, K, V, mask=None):
    scores = Q @ np.swapaxes(K, -1, -2) / np.sqrt(Q.shape[-1])
    return softmax(scores if mask is None else scores + mask) @ V


def function_of_matrices(x, W_q, W_k, W_v, W_o, num_heads, b_o=0, mask=None):
    def split(x):
        return x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)

    q, k, v = (split(x @ W) for W in (W_q, W_k, W_v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = softmax(scores if mask is None else np.where(mask, scores, -1e9))
    return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ W_o + b_o, weights


def torch_function_of_matrices(query, key, value, wq, wk, wv):
    q, k, v = (split(functional.linear(x, w), 2) for x, w in ((query, wq), (key, wk), (value, wv)))
    return merge(scaled_dot_product(q, k, v)[0])


class OneHead(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        return scaled_dot_product(self.query(x), self.key(x), self.value(x))


def flash_like(q, k, v, softmax_scale=None, causal=False):
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(*heads, is_causal=causal, scale=softmax_scale).transpose(1, 2)


class NoParameters(nn.Module):
    def forward(self, q, k, v, attend_mask=None):
        return scaled_dot_product(q, k, v, attend_mask)


def methods_only(q, k, v):
    return (q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def three_axes(queries, keys, values, valid_lens=None):
    mask = None if valid_lens is None else (torch.arange(keys.shape[1]) < valid_lens[:, None])[:, None]
    return scaled_dot_product(queries, keys, values, mask)


class Lettered(nn.Module):
    """Layers with names that state no role."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.a, self.b, self.c, self.d = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (split(layer(x), self.num_heads) for layer in (self.a, self.b, self.c))
        return self.d(merge(scaled_dot_product(q, k, v)[0]))


class NumPyLettered:
    """Matrices with names that state no role."""

    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.M1, self.M2, self.M3, self.M4 = np.random.default_rng(5).standard_normal((4, d_model, d_model))

    def __call__(self, x):
        return function_of_matrices(x, self.M1, self.M2, self.M3, self.M4, self.num_heads)[0]


def function_of_lettered_matrices(x, A, B, C, D, num_heads):
    return function_of_matrices(x, A, B, C, D, num_heads)[0]


class NoHeads(FromScratch):
    def __init__(self):
        super().__init__(12, 3)
        self.ways = self.num_heads
        del self.num_heads

    def forward(self, x):
        q, k, v = (split(layer(x), self.ways) for layer in (self.W_q, self.W_k, self.W_v))
        return self.W_o(merge(scaled_dot_product(q, k, v)[0]))


def positional(a, b, c):
    return methods_only(a, b, c)


GIVEN_WEIGHTS = {
    "query.weight": NumPyAttention(12, 3).W_q.T,
    "key.weight": NumPyAttention(12, 3).W_k.T,
    "value.weight": NumPyAttention(12, 3).W_v.T,
    "output.weight": NumPyAttention(12, 3).W_o.T,
    "output.bias": np.full(12, 0.5),
}
NANO = SimpleNamespace(n_head=3, n_embd=12)
RIGHT = {
    "from scratch": (FromScratch, {}),
    "from scratch, a mask per item": (FromScratch, {"mask_shape": "b,1,q,k"}),
    "from scratch, a mask per head": (FromScratch, {"mask_shape": "b,h,q,k"}),
    "from scratch, an integer mask": (FromScratch, {"mask_dtype": "int"}),
    "from scratch, five heads": (FromScratch, {"d_model": 20, "num_heads": 5}),
    "instance": (FromScratch(12, 4, dropout=0.5), {}),
    "float64 instance": (FromScratch(12, 3).double(), {}),
    "bfloat16 instance": (FromScratch(12, 3).bfloat16(), {}),
    "annotated": (Annotated, {}),
    "valid lengths": (DiveIntoDeepLearning, {}),
    "packed, causal": (CausalSelfAttention(NANO), {}),
    "packed, causal, constructed": (CausalSelfAttention, {}),
    "book": (FromTheBook, {}),
    "packed per head": (PackedPerHead, {}),
    "list of heads": (ListOfHeads, {}),
    "context": (Context, {}),
    "bare matrices": (Bare, {}),
    "torch": (nn.MultiheadAttention, {}),
    "torch, sequence first": (nn.MultiheadAttention(12, 4, batch_first=False), {}),
    "torch, other widths": (nn.MultiheadAttention(12, 4, kdim=7, vdim=5, batch_first=True, dtype=torch.float64), {}),
    "torch, added masks": (nn.MultiheadAttention(12, 2, batch_first=True), {"mask_means": "add", "padding_means": "add"}),
    "numpy": (NumPyAttention, {}),
    "numpy, given weights": (NumPyAttention(12, 3), {"weights": GIVEN_WEIGHTS}),
    "named layers": (Lettered, {"weights": {"query": "a", "key": "b", "value": "c", "output": "d"}}),
    "numpy, named matrices": (NumPyLettered, {"weights": {"query": "M1", "key.weight": "M2", "value": "M3", "output": "M4"}}),
    "named arguments": (function_of_lettered_matrices,
        {"arguments": dict(zip("ABCD", ("query.weight", "key.weight", "value.weight", "output.weight"), strict=True))}),
    "numpy, x @ W.T": (NumPyTransposed, {}),
    "numpy, one sequence": (NumPyOneSequence, {}),
    "torch function": (functional.scaled_dot_product_attention, {}),
    "torch function in float64": (functional.scaled_dot_product_attention, {"dtype": "float64"}),
    "by name": ("torch.nn.functional:scaled_dot_product_attention", {}),
    "function": (scaled_dot_product, {}),
    "numpy function": (numpy_function, {}),
    "function of matrices": (function_of_matrices, {}),
    "function of given matrices": (function_of_matrices, {"weights": GIVEN_WEIGHTS}),
    "function of matrices, x @ W.T": (torch_function_of_matrices, {}),
    "partial function": (functools.partial(scaled_dot_product, mask=None), {}),
    "class in float64": (FromScratch, {"dtype": "float64", "device": "cpu"}),
    "flash": (flash_like, {}),
    "chosen framework": (methods_only, {"framework": "torch"}),
    "found framework": (methods_only, {}),
    "module of heads": (NoParameters(), {}),
    "three axes": (three_axes, {}),
    "unknown number of heads": (NoHeads(), {}),
    "unknown parameters": (positional, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_correct_candidates_agree(name):
    candidate, options = RIGHT[name]
    comparison = compare(candidate, longest=128, **options)
    assert comparison.agrees, f"\n{comparison}"
    assert not all(result.skipped for result in comparison.results)


def _skipped(candidate, **options):
    return {result.case for result in compare(candidate, longest=7, **options).results if result.skipped}


def test_comparisons_in_threads_do_not_affect_each_other():
    def unscaled(Q, K, V, mask=None):
        return numpy_function(Q * np.sqrt(Q.shape[-1]), K, V, mask)

    def without_key_mask(Q, K, V, mask=None):
        return numpy_function(Q, K, V)

    candidates = [numpy_function, unscaled, without_key_mask] * 3
    with ThreadPoolExecutor(4) as threads:
        comparisons = list(threads.map(lambda candidate: compare(candidate, framework="numpy", mask_means="add", longest=7), candidates))
    hints = ["" if comparison.agrees else comparison.first.hint for comparison in comparisons]
    assert all(text in hint for hint, text in zip(hints, ["", "not divided by sqrt(head_dim)", "the mask is ignored"] * 3, strict=True))
    assert hints[::3] == [""] * 3


def test_weights_of_one_head_may_lack_the_head_axis():
    assert_agrees(OneHead, allow_skipped=True)


def test_cases_that_a_candidate_cannot_run_are_reported_with_the_reason():
    masked = {"mask", "cross-attention with a mask"}
    cross = {"cross-attention", "cross-attention with a mask"}
    assert _skipped(FromScratch, mask_means="attend") == set()
    assert _skipped(functional.scaled_dot_product_attention) == {"is_causal=True with a causal mask"}
    assert _skipped(nn.MultiheadAttention) == {"is_causal=True", "is_causal=True with padded keys"}
    assert _skipped(DiveIntoDeepLearning) == masked | {"causal mask", "packed sequences"}
    assert _skipped(flash_like, layout="b,n,h,d") == masked | {"padded keys", "packed sequences"}
    assert _skipped(PackedPerHead, mask_means="attend", fused="per_head") == cross
    assert "not run: it takes one input" in str(compare(PackedPerHead, mask_means="attend", fused="per_head"))


def test_the_comparison_does_not_change_the_module():
    module = FromScratch(12, 3)
    module.W_q.eval()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    assert_agrees(module, mask_means="attend")
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_constructing_a_class_keeps_the_random_state_and_makes_biases_nonzero():
    state = torch.get_rng_state()
    assert_agrees(nn.MultiheadAttention)
    assert torch.equal(torch.get_rng_state(), state)

    class ZeroesBiases(nn.MultiheadAttention):
        def forward(self, query, key, value):
            self.in_proj_bias.zero_()
            return super().forward(query, key, value)[0]

    assert not compare(ZeroesBiases).agrees


def test_comparing_numpy_candidates_does_not_import_torch():
    program = """if True:
        import sys
        import numpy as np
        from attend.check import compare

        def attend(query, key, value):
            e = np.exp(query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5)
            return e / e.sum(-1, keepdims=True) @ value

        with np.errstate(all="ignore"):
            comparison = compare(attend)
        assert comparison.first.case == "large logits" and "exp overflows" in comparison.first.hint, comparison
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)


# --- wrong ones: each is found, and named ---------------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """A correct candidate; tests replace one of its steps."""

    def __init__(self, d_model=12, num_heads=3):
        super().__init__()
        self.num_heads, self.d_model = num_heads, d_model
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return split(x, self.num_heads)

    def merge(self, x):
        return merge(x)

    def scale(self, scores):
        return scores / math.sqrt(self.d_model // self.num_heads)

    def fill(self, scores, mask):
        return scores.masked_fill(~mask, -torch.inf)

    def softmax(self, scores):
        return scores.softmax(-1)

    def returned(self, output, weights):
        return output, weights

    def forward(self, query, key, value, mask=None):
        q, k, v = (self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        scores = self.scale(q @ k.transpose(-2, -1))
        if mask is not None:
            scores = self.fill(scores, mask)
        weights = self.softmax(scores)
        return self.returned(self.out_proj(self.merge(weights @ v)), weights)


def without_maximum(self, scores):
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def reshape_split(self, x):
    return x.reshape(x.shape[0], self.num_heads, x.shape[1], -1)


def reshape_merge(self, x):
    return x.reshape(x.shape[0], x.shape[2], -1)


WRONG = {
    "no scale": ({"scale": lambda self, s: s}, "no mask", "not divided by sqrt(head_dim)"),
    "scale by d_model": ({"scale": lambda self, s: s / math.sqrt(self.d_model)}, "no mask", "sqrt(d_model)"),
    "scale by head_dim": ({"scale": lambda self, s: s / (self.d_model // self.num_heads)}, "no mask", "divided by head_dim"),
    "scale by 4": ({"scale": lambda self, s: s / 4}, "no mask", "divided by 4 and not by 2"),
    "half the scale": ({"scale": lambda self, s: Wrong.scale(self, s) / 2}, "no mask", "multiplied by 0.5, besides their scale"),
    "inverted mask": ({"fill": lambda self, s, m: s.masked_fill(m, -torch.inf)}, "mask", "mask is inverted"),
    "inverted mask, -1e9": ({"fill": lambda self, s, m: s.masked_fill(m, -1e9)}, "mask", "mask is inverted"),
    "ignored mask": ({"fill": lambda self, s, m: s}, "mask", "mask is ignored"),
    "transposed mask": ({"fill": lambda self, s, m: s.masked_fill(~m.mT, -1e9) if m.shape[-2] == m.shape[-1] else
        s.masked_fill(~m, -1e9)}, "mask", "mask is transposed"),
    "filled with zero": ({"fill": lambda self, s, m: s.masked_fill(~m, 0)}, "mask", "set to about 0"),
    "filled with 1e-9": ({"fill": lambda self, s, m: s.masked_fill(~m, 1e-9)}, "mask", "set to about 0"),
    "added mask": ({"fill": lambda self, s, m: s + m}, "mask", "(1 = attend) are added"),
    "causal by itself": ({"softmax": lambda self, s: s.masked_fill(torch.ones_like(s).triu(1).bool(), -1e9).softmax(-1)},
        "no mask", "causal without being asked"),
    "reshape split": ({"split": reshape_split}, "no mask", "heads are split by a reshape without"),
    "reshape merge": ({"merge": reshape_merge}, "no mask", "heads are merged by a reshape without"),
    "reshape both": ({"split": reshape_split, "merge": reshape_merge}, "no mask", "both split and merged"),
    "softmax over queries": ({"softmax": lambda self, s: s.softmax(-2)}, "no mask", "over the queries"),
    "softmax over heads": ({"softmax": lambda self, s: s.softmax(1)}, "no mask", "over the heads"),
    "no maximum": ({"softmax": without_maximum}, "large logits", "exp overflows"),
    "residual": ({"forward": lambda self, query, key, value: Wrong.forward(self, query, key, value)[0] + query},
        "no mask", "residual"),
    "scores returned": ({"softmax": lambda self, s: s.softmax(-1), "returned": lambda self, o, w: (o, w.log())}, "no mask", None),
    "keras order": ({"forward": lambda self, query, key, value: Wrong.forward(self, query, value, key)},
        "no mask", "key and value are exchanged"),
    "weights in one axis": ({"returned": lambda self, o, w: (o, w.flatten(0, 1))}, "no mask", "one axis"),
    "scale by a constant": ({"scale": lambda self, s: s / math.sqrt(64)}, "no mask", "divided by 8 and not by 2"),
    "two at once": ({"scale": lambda self, s: s, "merge": reshape_merge}, "no mask", None),
    "scale by any constant": ({"scale": lambda self, s: s * 0.37}, "no mask", "divided by 2.703 and not by 2"),
    "nothing known": ({"scale": lambda self, s: s.sin()}, "no mask", None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_candidates_are_named(name):
    replaced, case, hint = WRONG[name]
    comparison = compare(type("Wrong", (Wrong,), replaced), causal=False, **({} if "forward" in replaced else {"mask_means": "attend"}))
    assert not comparison.agrees
    assert comparison.first.case == case, f"\n{comparison}"
    assert (hint or "no known mistake gives these numbers") in comparison.first.hint, f"\n{comparison}"


@pytest.mark.parametrize(
    ("biases", "named"),
    [
        ((0, 1, 1, 3), "the bias of the key projection is added to the projected value"),
        ((2, 1, 2, 3), "the bias of the value projection is added to the projected query"),
        ((0, 1, 2, 0), "the bias of the query projection is added to the projected heads"),
    ],
)
def test_a_bias_of_another_projection_is_named(biases, named):
    class OtherBiases(NumPyAttention):
        def __init__(self, d_model, num_heads):
            super().__init__(d_model, num_heads)
            self.b_q, self.b_k, self.b_v, self.b_o = np.random.default_rng(7).standard_normal((4, d_model))

        def forward(self, query, key, value):
            given = (self.b_q, self.b_k, self.b_v, self.b_o)
            q, k, v, o = (given[i] for i in biases)
            inputs = ((query, self.W_q, q), (key, self.W_k, k), (value, self.W_v, v))
            heads = numpy_function(*(self.split(x @ W + b) for x, W, b in inputs))
            return heads.transpose(0, 2, 1, 3).reshape(query.shape) @ self.W_o + o

    explanation = compare(OtherBiases).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


def test_two_mistakes_that_show_in_different_cases_are_told_one_after_the_other():
    changed = {"scale": lambda self, s: s, "fill": lambda self, s, m: s.masked_fill(m, -torch.inf)}
    first, second = compare(type("Wrong", (Wrong,), changed), mask_means="attend").disagreements
    assert (first.case, first.mistakes) == ("no mask", ("the scores are not divided by sqrt(head_dim)",))
    assert second.case == "mask" and len(second.mistakes) == 1 and "inverted" in second.mistakes[0]


def test_the_report_shows_a_mistake_and_a_later_exception():
    def forward(self, query, key, value, mask=None):
        return Wrong.forward(self, query, key, value, None if mask is None else mask.view(7, 7))

    changed = {"scale": lambda self, s: s, "forward": forward}
    report = str(compare(type("Wrong", (Wrong,), changed), mask_means="attend", mask_shape="q,k"))
    assert "first disagreement: no mask, output" in report
    assert "also disagreement: mask, output: expected a result, got RuntimeError" in report


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("fused", ["q,k,v", "per_head"])
def test_a_packed_matrix_that_is_cut_in_another_order_is_named(fused, heads):
    candidate = PackedPerHead(12, 12, heads) if fused == "q,k,v" else CausalSelfAttention(SimpleNamespace(n_head=heads, n_embd=12))
    options = {} if fused == "q,k,v" else {"causal": True, "weights": {"qkv": "c_attn", "output": "c_proj"}}
    first = compare(candidate, mask_means="attend", fused=fused, **options).first
    assert len(first.mistakes) == 1 and "is cut as [" in first.hint and "see fused" in first.hint


def test_the_candidate_without_mistakes_agrees():
    assert_agrees(Wrong, mask_means="attend")


def test_weights_averaged_over_heads_are_told_by_their_shape():
    averaged = type("Averaged", (Wrong,), {"returned": lambda self, output, weights: (output, weights.mean(1))})
    summed = type("Summed", (Wrong,), {"returned": lambda self, output, weights: (output, weights.sum(1))})
    assert_agrees(averaged)
    assert compare(summed, mask_means="attend").first.output == "attention_weights"


def causal_scores(blocked):
    """Attention of heads with a causal mask of its own: `blocked` makes it from the number of rows."""

    def attend(query, key, value):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return torch.softmax(scores.masked_fill(blocked(query.shape[-2]), -1e9), dim=-1) @ value

    return attend


@pytest.mark.parametrize(
    ("blocked", "named"),
    [
        (lambda n: torch.zeros(n, n, dtype=torch.bool), "causality is forgotten: queries attend to keys after their own"),
        (lambda n: torch.ones(n, n).triu(0) == 1, "its causal mask blocks each query's own key (off by one)"),
        (lambda n: torch.ones(n, n).tril(-1) == 0, "its causal mask blocks each query's own key (off by one)"),
        (lambda n: torch.ones(n, n).triu(2) == 1, "its causal mask lets each query see the next key (off by one)"),
        (lambda n: torch.ones(n, n).tril(-1) == 1, "its causal mask is transposed: queries attend to their own key and later ones"),
    ],
)
def test_a_wrong_causal_mask_has_one_name(blocked, named):
    explanation = compare(causal_scores(blocked), framework="torch", causal=True).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


def alibi_slopes(heads, first=1):
    return [2 ** (-8 * (first + i) / heads) for i in range(heads)]


@pytest.mark.parametrize(
    ("heads", "slopes", "is_scaled", "named"),
    [
        (4, alibi_slopes(4), False, ()),
        (3, [2**-4, 2**-8, 2**-2], False, ()),
        (4, alibi_slopes(4, first=0), False, ("ALiBi's slopes begin at 1",)),
        (3, alibi_slopes(3), False, ("ALiBi's slopes for a number of heads that is not a power of 2",)),
        (4, alibi_slopes(4), True, ("the biases of positions are added before the scores are scaled",)),
        (4, [-slope for slope in alibi_slopes(4)], False, ("ALiBi's biases have the opposite sign",)),
    ],
)
def test_wrong_slopes_and_places_of_alibi_are_named(heads, slopes, is_scaled, named):
    def attend(query, key, value):
        scale, distance = query.shape[-1] ** -0.5, torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
        bias = -torch.tensor(slopes, dtype=query.dtype)[:, None, None] * distance.abs()
        scores = query @ key.mT * scale + bias * (scale if is_scaled else 1)
        return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value

    spec = LayerSpec(d_model=5 * heads, num_heads=heads, projections=False, alibi=True)
    comparison = compare(attend, spec=spec, causal=True, framework="torch")
    mistakes = () if comparison.agrees else comparison.first.mistakes
    assert len(mistakes) == len(named), f"\n{comparison}"
    assert all(words in " and ".join(mistakes) for words in named)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [(4, "slopes 2^(-8i/n), i from 1, of n heads (ALiBi)"), (6, "slopes 2^(-8i/4), i = 1 to 4; then 2^(-8i/8), i = 1, 3, … (ALiBi)")],
)
def test_the_expected_slopes_are_those_of_the_number_of_heads(heads, expected):
    """Press et al. 2022: for 6 heads 1/4, 1/16, 1/64, 1/256, 1/2, 1/8."""

    def attend(query, key, value):
        distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
        bias = -torch.tensor(alibi_slopes(heads, first=0), dtype=query.dtype)[:, None, None] * distance.abs()
        return (query @ key.mT * query.shape[-1] ** -0.5 + bias).masked_fill(distance < 0, -torch.inf).softmax(-1) @ value

    spec = LayerSpec(d_model=5 * heads, num_heads=heads, projections=False, alibi=True)
    explanation = compare(attend, spec=spec, causal=True, framework="torch").first.explanation
    assert explanation.mistakes == ("ALiBi's slopes begin at 1, that of i = 0",)
    assert explanation.arithmetic == (("slopes 2^(-8i/n), i from 0, of n heads (ALiBi)", expected),)


@pytest.mark.parametrize(
    ("capped", "named"),
    [
        (lambda s: 2 * torch.tanh(s), "the scores are not divided by the softcap before tanh"),
        (lambda s: s * torch.tanh(s / 2), "tanh is not multiplied by the softcap, but by the scores"),
        (lambda s: torch.tanh(s / 2), "tanh is not multiplied by the softcap"),
    ],
)
def test_wrong_soft_caps_are_named(capped, named):
    def attend(query, key, value):
        return capped(query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

    spec = LayerSpec(d_model=15, num_heads=3, projections=False, softcap=2.0)
    assert compare(attend, spec=spec, framework="torch").first.mistakes == (named,)


@pytest.mark.parametrize(
    ("at_end", "named"),
    [
        (False, "it is causal without being asked (see causal)"),
        (True, "it is causal without being asked, aligned at the last key (see causal and query_offset)"),
    ],
)
def test_a_causal_function_is_named_wherever_its_mask_is_aligned(at_end, named):
    def attend(query, key, value):
        queries, keys = query.shape[2], key.shape[2]
        blocked = torch.ones(queries, keys).triu(1 + at_end * (keys - queries)).bool()
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return scores.masked_fill(blocked, -torch.inf).softmax(-1) @ value

    explanation = compare(attend, framework="torch", causal=False).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


@pytest.mark.parametrize(("offset", "named"), [("end", None), ("start", "its causal mask is aligned at the last key")])
def test_a_causal_mask_for_fewer_queries_than_keys_is_aligned_as_the_option_says(offset, named):
    def attend(query, key, value):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones_like(scores).triu(1 + key.shape[-2] - query.shape[-2]) == 1
        return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1) @ value

    comparison = compare(attend, framework="torch", causal=True, query_offset=offset)
    tried = [result.case for result in comparison.results if not result.skipped]
    assert tried[:3] == ["no mask", "cross-attention", "large logits"] and "113 keys, cross-attention" in tried
    assert comparison.agrees if named is None else comparison.first.mistakes[0].startswith(named)


class Cached(nn.Module):
    """Causal attention with a cache of keys and values, whose last query is at the last key."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def first_position(self, queries, keys):
        return keys - queries

    def used(self, cache):
        return cache

    def forward(self, x, kv_cache=None):
        q, k, v = (split(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if (cache := self.used(kv_cache)) is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
        rows = torch.arange(q.shape[2])[:, None] + self.first_position(q.shape[2], k.shape[2])
        output, _ = scaled_dot_product(q, k, v, torch.arange(k.shape[2]) <= rows)
        return self.o_proj(merge(output)), (k, v)


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        ({}, None),
        ({"first_position": lambda self, queries, keys: 0}, "in a call with a cache, the causal mask is aligned at the first key"),
        (
            {"first_position": lambda self, queries, keys: keys - 1 if queries == 1 else 0},
            "in a call of several rows with a cache, the causal mask is aligned at the first key",
        ),
        ({"used": lambda self, cache: None}, "the cache is not used: each call sees its own rows alone"),
    ],
)
def test_a_candidate_with_a_cache_is_decoded_and_compared_with_one_causal_call(replaced, named):
    comparison = compare(type("Cached", (Cached,), replaced), causal=True)
    cases = {result.case: result.agrees for result in comparison.results}
    assert cases["no mask"] is True
    assert cases["decoding row by row"] is (named is None or "several rows" in named)
    assert cases["decoding in chunks"] is (named is None)
    assert comparison.agrees if named is None else comparison.first.mistakes[0].startswith(named)


class LengthOfAnotherAxis(Cached):
    """Reads the length of the cache from one of its axes, 2 if it is right; `alone`: calls of one row have a mask too."""

    axis, alone = 2, True

    def used(self, cache):
        self.length = 0 if cache is None else len(cache) if self.axis is None else cache[0].shape[self.axis]
        return cache

    def first_position(self, queries, keys):
        return self.length if self.alone or queries > 1 else keys - 1


class KeysOfAnotherAxis(LengthOfAnotherAxis):
    """Reads the number of all keys from one of their axes."""

    def first_position(self, queries, keys):
        sizes = {0: self.batch, 1: self.num_heads, 2: keys, 3: self.q_proj.out_features // self.num_heads}
        return sizes[self.axis] - queries if self.alone or queries > 1 else keys - 1

    def forward(self, x, kv_cache=None):
        self.batch = len(x)
        return super().forward(x, kv_cache)


AXES = {0: "the size of the batch", 1: "the number of key heads", 3: "head_dim", None: "len((K, V))"}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("axis", AXES)
def test_a_length_that_is_read_from_another_axis_of_the_cache_is_named(axis, alone):
    assert_agrees(type("Right", (LengthOfAnotherAxis,), {"alone": alone}), causal=True, allow_skipped=True)
    explanation = compare(type("Wrong", (LengthOfAnotherAxis,), {"axis": axis, "alone": alone}), causal=True).first.explanation
    call = "a call" if alone else "a call of several rows"
    assert explanation.mistakes == (f"in {call} with a cache, {AXES[axis]} is taken for the length of the cache in the causal mask",)
    assert not explanation.equals


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_a_number_of_keys_that_is_read_from_another_axis_is_named(axis, alone):
    assert_agrees(type("Right", (KeysOfAnotherAxis,), {"alone": alone}), causal=True, allow_skipped=True)
    explanation = compare(type("Wrong", (KeysOfAnotherAxis,), {"axis": axis, "alone": alone}), causal=True).first.explanation
    call = "" if alone else "in a call of several rows, "
    assert explanation.mistakes == (f"{call}{AXES[axis]} is taken for the number of keys in the causal mask",)
    assert not explanation.equals


class RotatedCache(nn.Module):
    """Grouped heads with RoPE, whose positions begin at the length of the cache [b, n, h, d]: that is axis 1."""

    query_axis = key_axis = 1

    def __init__(self, d_model, num_heads, num_kv_heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        heads = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        for name, number in heads.items():
            setattr(self, name, nn.Linear(d_model, number * head_dim, bias=False))
        self.o_proj = nn.Linear(num_heads * head_dim, d_model, bias=False)

    def rotate(self, x, role, past):
        start = 0 if past is None else past[0].shape[getattr(self, f"{role}_axis")]
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = ((start + torch.arange(x.shape[1]))[:, None] * frequencies)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)

    def forward(self, x, past=None):
        q, k, v = (layer(x).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q, "query", past), self.rotate(k, "key", past)
        k, v = (k, v) if past is None else (torch.cat(pair, dim=1) for pair in zip(past, (k, v), strict=True))
        keys, values = (rows.transpose(1, 2).repeat_interleave(q.shape[2] // rows.shape[2], dim=1) for rows in (k, v))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        output, _ = scaled_dot_product(q.transpose(1, 2), keys, values, visible)
        return self.o_proj(merge(output)), (k, v)


@pytest.mark.parametrize(("axis", "size"), [(0, "the size of the batch"), (2, "the number of key heads"), (3, "head_dim")])
@pytest.mark.parametrize(("roles", "of"), [(("query", "key"), ""), (("query",), " of queries"), (("key",), " of keys")])
def test_positions_of_rope_that_begin_at_another_axis_of_the_cache_are_named(axis, size, roles, of):
    rope = {"theta": 10000.0, "interleaved": False}
    spec = LayerSpec(d_model=26, num_heads=6, num_kv_heads=3, head_dim=10, bias=False, rope=rope)
    wrong = type("Wrong", (RotatedCache,), {f"{role}_axis": axis for role in roles})
    assert compare(RotatedCache, spec=spec, causal=True).agrees
    explanation = compare(wrong, spec=spec, causal=True).first.explanation
    assert explanation.mistakes == (f"in a call with a cache, {size} is taken for the length of the cache in RoPE's positions{of}",)
    assert not explanation.equals


def attention_of(query, key, value):
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
    return weights / weights.sum(-1, keepdims=True) @ value


def rows_of_sequence(start, end, keys):
    return slice(start, end), slice(start, end)


def packed_attention(sequences=itertools.pairwise, empty=np.zeros_like, seen=rows_of_sequence, is_joined=False):
    """A function of packed sequences: `seen` has the rows of the keys and of the values of each; `is_joined`: it appends their outputs."""

    def attend(query, key, value, cu_seqlens):
        output, parts = empty(query), []
        for start, end in sequences(list(cu_seqlens)):
            keys, values = seen(start, end, key.shape[-2])
            parts.append(attention_of(query[:, start:end], key[:, keys], value[:, values]))
            output[:, start:end] = parts[-1]
        return np.concatenate(parts, axis=-2) if is_joined else output

    return attend


def packed_or_alone(**wrong):
    """A function of packed sequences, or of one without cu_seqlens."""
    packed = packed_attention(**wrong)

    def attend(query, key, value, cu_seqlens=None):
        return attention_of(query, key, value) if cu_seqlens is None else packed(query, key, value, cu_seqlens)

    return attend


def compare_packed(candidate):
    return compare(candidate, batched=False, framework="numpy")


@pytest.mark.parametrize("make", [packed_attention, packed_or_alone])
def test_packed_sequences_that_are_right_agree(make):
    assert compare_packed(make()).agrees and compare_packed(make(is_joined=True)).agrees


def without_last(boundaries):
    return itertools.pairwise(boundaries[:-1])


def without_first(boundaries):
    return itertools.pairwise(boundaries[1:])


LAST, FIRST = "the last of the packed sequences is not computed", "the first of the packed sequences is not computed"
QUERIES_STAY = "its queries stay in place of the outputs of its heads"


@pytest.mark.parametrize(
    ("make", "wrong", "named"),
    [
        (packed_attention, {"seen": lambda s, e, n: [np.arange(s, e)[:-1]] * 2}, "the last key is left out"),
        (packed_attention, {"seen": lambda s, e, n: [np.arange(s, e)[1:]] * 2}, "the first key is left out"),
        (packed_attention, {"sequences": without_last}, f"{LAST}, nor is one alone: the outputs of its heads stay 0"),
        (packed_or_alone, {"sequences": without_last}, f"{LAST}: the outputs of its heads stay 0"),
        (packed_attention, {"sequences": without_last, "empty": np.copy}, f"{LAST}, nor is one alone: {QUERIES_STAY}"),
        (packed_or_alone, {"sequences": without_last, "empty": np.copy}, f"{LAST}: {QUERIES_STAY}"),
        (packed_attention, {"sequences": without_first}, f"{FIRST}, nor is one alone: the outputs of its heads stay 0"),
        (packed_or_alone, {"sequences": without_first, "is_joined": True}, f"{FIRST}: its rows are missing"),
        (packed_attention, {"seen": lambda s, e, n: [slice(0, e)] * 2}, "the keys of each packed sequence begin at row 0, and not at"),
        (packed_or_alone, {"seen": lambda s, e, n: [slice(0, e)] * 2}, "the keys of each packed sequence begin at row 0, and not at"),
        (packed_attention, {"seen": lambda s, e, n: [slice(s, n)] * 2}, "the keys of each packed sequence go on to the last row"),
        (packed_attention, {"seen": lambda s, e, n: [slice(e - s)] * 2}, "the keys and values of each packed sequence are rows 0 to"),
        (packed_or_alone, {"seen": lambda s, e, n: (slice(e - s), slice(s, e))}, "the keys of each packed sequence are rows 0 to"),
        (packed_attention, {"seen": lambda s, e, n: (slice(s, e), slice(e - s))}, "the values of each packed sequence are rows 0 to"),
    ],
)
def test_mistakes_in_the_loop_over_packed_sequences_are_named(make, wrong, named):
    explanation = compare_packed(make(**wrong)).first.explanation
    assert len(explanation.mistakes) == 1 and explanation.mistakes[0].startswith(named) and not explanation.equals


class PackedModule(nn.Module):
    """Packed sequences, one after the other; `projects_each`: the output of each is projected, and not that of all."""

    sequences, empty, projects_each = staticmethod(itertools.pairwise), staticmethod(torch.zeros_like), False

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, cu_seqlens=None):
        q, k, v = (split(layer(x)[None], self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        heads, output = self.empty(q), self.empty(x)
        for start, end in self.sequences([0, len(x)] if cu_seqlens is None else cu_seqlens.tolist()):
            heads[:, :, start:end], _ = scaled_dot_product(*(rows[:, :, start:end] for rows in (q, k, v)))
            output[start:end] = self.o_proj(merge(heads[:, :, start:end])[0])
        return output if self.projects_each else self.o_proj(merge(heads)[0])


@pytest.mark.parametrize(
    ("empty", "projects_each", "named"),
    [
        (torch.zeros_like, False, "the outputs of its heads stay 0"),
        (torch.clone, False, QUERIES_STAY),
        (torch.zeros_like, True, "its output stays 0"),
        (torch.clone, True, "its input stays in place of its output"),
    ],
)
def test_what_stays_in_the_rows_of_a_packed_sequence_that_is_left_out_is_named(empty, projects_each, named):
    changed = {"empty": staticmethod(empty), "projects_each": projects_each}
    assert compare(type("Right", (PackedModule,), changed), batched=False).agrees
    wrong = type("Wrong", (PackedModule,), changed | {"sequences": staticmethod(without_last)})
    explanation = compare(wrong, batched=False, causal=False).first.explanation
    assert explanation.mistakes == (f"{LAST}, nor is one alone: {named}",) and not explanation.equals


def test_missing_rows_are_explained_by_no_mistake_that_returns_all():
    def forward(self, x, cu_seqlens=None):
        return PackedModule.forward(self, x, cu_seqlens)[: len(x) if cu_seqlens is None else 1]

    assert not compare(type("Short", (PackedModule,), {"forward": forward}), batched=False).first.mistakes


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        (lambda ids, item: range(1, ids.max() + 1), None),
        (lambda ids, item: range(ids.max()), "the packed sequence with the highest number in the batch is not computed: "),
        (lambda ids, item: range(ids[item].max()), f"{LAST}: "),
    ],
)
def test_a_number_of_packed_sequences_that_is_left_out_is_named(numbers, named):
    def attend(query, key, value, segment_ids=None):
        output = np.zeros_like(query)
        for item in range(len(query)):
            ids = np.ones(query.shape[2]) if segment_ids is None else segment_ids[item]
            for number in [1] if segment_ids is None else numbers(segment_ids, item):
                rows, keys = ids == number, slice(None) if segment_ids is None else ids == number
                output[item, :, rows] = attention_of(query[item][:, rows], key[item][:, keys], value[item][:, keys]).swapaxes(0, 1)
        return output

    comparison = compare(attend, framework="numpy")
    assert (None if comparison.agrees else comparison.first.mistakes) == (named and (f"{named}the outputs of its heads stay 0",))


def online_softmax(keys, rescales_sum, rescales_output):
    """Attention of heads in blocks of so many keys, with a running maximum."""

    def attend(query, key, value):
        largest, total, output = np.full((*query.shape[:3], 1), -np.inf), 0.0, 0.0
        for start in range(0, key.shape[2], keys):
            scores = query @ key[:, :, start : start + keys].swapaxes(-1, -2) / query.shape[-1] ** 0.5
            new = np.maximum(largest, scores.max(-1, keepdims=True))
            factor, weights = np.exp(largest - new), np.exp(scores - new)
            total = total * (factor if rescales_sum else 1) + weights.sum(-1, keepdims=True)
            output = output * (factor if rescales_output else 1) + weights @ value[:, :, start : start + keys]
            largest = new
        return output / total

    return attend


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize(
    ("rescales", "named"),
    [
        ((True, True), None),
        ((True, False), "the output is not rescaled when the maximum grows"),
        ((False, True), "the sum is not rescaled when the maximum grows"),
        ((False, False), "sum and output are not rescaled when the maximum grows"),
    ],
)
def test_a_running_maximum_that_rescales_too_little_is_named(keys, rescales, named):
    comparison = compare(online_softmax(keys, *rescales), framework="numpy")
    assert comparison.agrees if named is None else comparison.first.mistakes == (f"in the online softmax with blocks of {keys}, {named}",)


def test_a_wrong_mask_that_leaves_rows_without_a_key_is_named_however_they_are_filled():
    """Softmax of such a row is NaN with -inf, uniform with -1e9, and 0 where NaN is replaced."""
    for fill, replaced in ((-math.inf, math.nan), (-1e9, math.nan), (-math.inf, 0.0)):

        def attend(query, key, value, mask=None, fill=fill, replaced=replaced):
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            weights = (scores if mask is None else scores.masked_fill(mask, fill)).softmax(dim=-1).nan_to_num(replaced)
            return weights @ value

        explanation = compare(attend, framework="torch", mask_means="attend").first.explanation
        assert "the mask is inverted" in explanation.mistakes[0] and not explanation.equals


@pytest.mark.parametrize("returns_weights", [True, False])
def test_any_constant_factor_on_the_scores_is_found(returns_weights):
    def attend(query, key, value):
        weights = torch.softmax(query @ key.transpose(-1, -2) / 1.7, dim=-1)
        return (weights @ value, weights) if returns_weights else weights @ value

    assert compare(attend, framework="torch").first.mistakes == ("the scores are divided by 1.7 and not by 2",)


def test_cases_without_a_known_parameter_are_reported_as_not_tried():
    comparison = compare(causal_scores(lambda n: torch.ones(n, n).triu(1) == 1), framework="torch", causal=True, longest=65)
    assert comparison.agrees
    assert comparison.untried == ("mask", "cross-attention", "cross-attention with a mask", "padded keys", "packed sequences")
    not_tried = (
        "not tried: mask, padded keys, packed sequences, since no parameter is known for them; "
        "cross-attention, cross-attention with a mask, since query_offset is not given"
    )
    looked = "with up to 65 keys, heads of 4 to 256 numbers, in float32"
    assert comparison.conclusion == f"agrees with the reference in all 5 cases that were tried, {looked}; {not_tried}"
    wrong = compare(causal_scores(lambda n: torch.ones(n, n).triu(2) == 1), framework="torch", causal=True)
    assert not_tried in str(wrong).replace("\n", " ")


def test_the_only_case_that_was_tried_is_one():
    results = compare(causal_scores(lambda n: torch.ones(n, n).triu(1) == 1), framework="torch", causal=True, longest=7).results
    one = Comparison(tuple(result for result in results if result.untried or result.case == "no mask"), (), keys=5)
    assert one.conclusion.startswith("agrees with the reference in the only case that was tried, with up to 5 keys; not tried: mask, ")
    none = Comparison(tuple(result for result in results if result.untried), ())
    assert none.conclusion.startswith("neither agrees nor disagrees with the reference; not tried: mask, ")


def test_the_assertion_warns_of_cases_that_are_not_tried():
    candidate, options = causal_scores(lambda n: torch.ones(n, n).triu(1) == 1), {"framework": "torch", "causal": True, "longest": 7}
    with pytest.warns(UserWarning, match="cases that were tried, with up to 5 keys, .* in float32; not tried: mask, padded keys"):
        assert_agrees(candidate, **options)
    assert_agrees(candidate, **options, allow_skipped=True)


def test_inputs_that_are_passed_apart_are_told_apart():
    """Also by a causal candidate whose queries and keys are always equally many."""
    right = causal_scores(lambda n: torch.ones(n, n).triu(1) == 1)
    assert not compare(lambda query, key, value: right(query, key, key), framework="torch", causal=True).agrees


@pytest.mark.parametrize(
    ("attend", "named"),
    [
        (lambda q, k, v, s: s.bfloat16().softmax(-1).float() @ v, "the softmax is computed in bfloat16"),
        (lambda q, k, v, s: s.half().float().softmax(-1) @ v, "the scores are rounded to float16 before the softmax"),
        (
            lambda q, k, v, s: ((q.bfloat16().float() @ k.bfloat16().float().mT).bfloat16().float() / 5**0.5).softmax(-1) @ v,
            "queries and keys are multiplied in bfloat16",
        ),
        (
            lambda q, k, v, s: (s.softmax(-1).half().float() @ v.half().float()).half().float(),
            "weights and values are multiplied in float16",
        ),
    ],
)
def test_steps_in_half_precision_are_told_from_rounding(attend, named):
    """Each is named by its own numbers, and no other is: a tolerance that is wider only where a rounding is undecided.

    Sums are in float32 and then rounded, since each processor's kernels round sums of few digits in their own way.
    """

    def candidate(query, key, value):
        return attend(query, key, value, query @ key.mT / query.shape[-1] ** 0.5)

    explanation = compare(candidate, framework="torch", d_model=15).first.explanation
    assert (explanation.mistakes, explanation.equals) == ((named,), ())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("attend", "rounding"),
    [
        (
            lambda q, k, v, scale: (q.float() @ k.float().mT * scale).softmax(-1).to(v.dtype) @ v,
            "scores are computed in float32; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            lambda q, k, v, scale: (q.float() @ k.float().mT * scale).to(v.dtype).softmax(-1) @ v,
            "scores are rounded to {} after the scale; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            lambda q, k, v, scale: (q @ k.mT * scale).softmax(-1) @ v,
            "scores are rounded to {} before and after the scale; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            lambda q, k, v, scale: (q * scale @ k.mT).softmax(-1) @ v,
            "scores and queries times the scale are rounded to {}; weights are rounded to {} before they are multiplied by the values",
        ),
        (
            lambda q, k, v, scale: ((q.float() @ k.float().mT * scale).softmax(-1) @ v.float()).to(v.dtype),
            "scores are computed in float32; weights are computed in float32, and so is their product with the values",
        ),
        (lambda q, k, v, scale: (sum(q[..., :, None, i] * k[..., None, :, i] for i in range(5)) * scale).softmax(-1) @ v, None),
    ],
)
def test_steps_that_a_candidate_in_half_precision_rounds_are_told(attend, rounding, dtype):
    """Each agrees, since its errors are no larger than those of correct implementations that round elsewhere."""
    comparison = compare(lambda query, key, value: attend(query, key, value, 5**-0.5), framework="torch", dtype=dtype, d_model=15)
    assert comparison.agrees
    assert comparison.rounding == (rounding or "").replace("{}", dtype)
    assert ("\nrounding: scores" in str(comparison)) is (rounding is not None)


def test_a_scale_that_is_a_power_of_2_does_not_show_where_scores_are_rounded():
    comparison = compare(lambda query, key, value: (query @ key.mT / 2).softmax(-1) @ value, framework="torch", dtype="bfloat16")
    assert comparison.rounding.startswith("scores are rounded to bfloat16; weights are rounded")


def test_roundings_of_float32_are_not_told():
    assert not compare(lambda query, key, value: (query @ key.mT / 2).softmax(-1) @ value, framework="torch").rounding


@pytest.mark.parametrize(("factor", "about"), [(0.758, "1.31"), (0.7, "1.4"), (0.3, "3.3")])
def test_a_factor_in_half_precision_is_told_from_others_within_the_tolerance(factor, about):
    """0.758 and sqrt(1/2) give numbers that differ by less than the largest rounding error, but not on average."""

    def attend(query, key, value):
        return (query.float() @ key.float().mT * factor).softmax(-1).bfloat16() @ value

    first = compare(attend, framework="torch", dtype="bfloat16").first
    assert first.mistakes[0].startswith(f"the scores are divided by about {about}")
    assert "this is what comes out, as far as bfloat16 shows, when" in first.hint and not first.explanation.equals


@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (lambda q, k: 2**0.5, "the scores are divided by 1.414 and not by 2"),
        (lambda q, k: q.shape[0] ** 0.5, "the scores are divided by sqrt(the batch size) and not by sqrt(head_dim)"),
        (lambda q, k: 5**0.5, "the scores are divided by 2.236 and not by 2"),
        (lambda q, k: q.shape[2] ** 0.5, "the scores are divided by sqrt(the number of queries) and not by sqrt(head_dim)"),
    ],
)
def test_a_size_is_told_from_a_constant(scale, named):
    """Further cases have another batch size and another number of queries."""

    def attend(query, key, value):
        assert query.ndim == 4  # without a batch, the axis of the queries is that of the numbers
        return (query @ key.mT / scale(query, key)).softmax(-1) @ value

    first = compare(attend, framework="torch").first
    assert (first.mistakes, first.explanation.equals) == ((named,), ())


def test_weights_far_below_those_of_blocked_keys_are_no_reason_to_exclude_a_mistake():
    """Without exp, a score of -1e30 gives a blocked key all the weight, and leaves visible keys 1e-30."""

    def attend(query, key, value, attend_mask=None):
        scores = query @ key.swapaxes(-1, -2) / 2
        scores = scores if attend_mask is None else np.where(attend_mask, scores, -1e30)
        weights = scores - scores.max(axis=-1, keepdims=True)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights @ value, weights

    named = "there is no exp: the scores less the largest of the row are divided by their sum"
    assert compare(attend, framework="numpy").first.mistakes == (named,)


def test_a_blocking_number_that_float16_cannot_hold_has_a_hint():
    def attend(query, key, value, attend_mask=None):
        scores = query @ key.mT / 2
        return (scores if attend_mask is None else scores.masked_fill(~attend_mask, -1e9)).softmax(-1) @ value

    first = compare(attend, framework="torch", mask_shape="q,k", dtype="float16").first
    assert "larger than float16 can hold" in first.hint and "RuntimeError" in first.got
    assert compare(attend, framework="torch", mask_shape="q,k", dtype="bfloat16").agrees


def test_numbers_that_are_all_nan_have_a_hint_of_their_own():
    def attend(query, key, value):
        return (query @ key.mT).masked_fill(torch.ones(query.shape[2], key.shape[2]) == 1, -math.inf).softmax(-1) @ value

    first = compare(attend, framework="torch").first
    assert not first.mistakes and first.hint.startswith("no number is finite: ")


def test_a_factor_after_the_softmax_is_fitted():
    """As of dropout that is scaled in evaluation mode too."""

    def candidate(query, key, value):
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) / 0.9
        return weights @ value, weights

    assert compare(candidate, framework="torch").first.mistakes == ("the weights are multiplied by 1.111",)


class InPlace(Cached):
    """A cache that is a list of keys and values, which each call changes."""

    def forward(self, x, kv_cache=None):
        kv_cache = [] if kv_cache is None else kv_cache
        output, kv_cache[:] = super().forward(x, tuple(kv_cache) or None)
        return output


class KeepsPositions(InPlace):
    """Its last position is not in the cache, so that it survives a roll-back."""

    def first_position(self, queries, keys):
        self.rows = queries if keys == queries else self.rows + queries
        return self.rows - queries


class Llama(Cached):
    """A cache in the module, and the position of the first row as an argument."""

    def forward(self, x, start_pos):
        kept = [rows[:, :, :start_pos] for rows in self.kept] if start_pos else None
        output, self.kept = super().forward(x, kept)
        return output


class ForgetsToRollBack(Llama):
    def forward(self, x, start_pos):
        output, self.kept = Cached.forward(self, x, self.kept if start_pos else None)
        return output


@pytest.mark.parametrize(
    ("candidate", "options", "wrong", "named"),
    [
        (InPlace, {"new_cache": "list"}, set(), ()),
        (KeepsPositions, {"new_cache": "list"}, {"decoding with roll-back"}, ()),
        (Llama, {}, set(), ()),
        (ForgetsToRollBack, {}, {"decoding with roll-back"}, ("rows that were rolled back stay in the cache",)),
    ],
)
def test_caches_in_place_and_in_the_candidate_are_decoded_and_rolled_back(candidate, options, wrong, named):
    comparison = compare(candidate, causal=True, **options)
    assert {result.case for result in comparison.results if result.agrees is False} == wrong
    assert sum(result.case.startswith("decoding") for result in comparison.results) == 4
    assert (comparison.first.mistakes if comparison.first else ()) == named


class Foreign:
    """An array of another framework: NumPy can read it, and nothing else is known of it."""

    def __init__(self, x):
        self.x = np.asarray(x)
        self.shape, self.dtype = self.x.shape, f"foreign.core.{self.x.dtype}"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.x, dtype)


def test_arrays_of_other_frameworks_are_results_and_weights():
    class Attention(NumPyAttention):
        def forward(self, query, key, value, mask=None):
            return tuple(map(Foreign, super().forward(query, key, value, mask)))

    assert_agrees(Attention, mask_means="block")
    weights = NumPyAttention(12, 3)
    given = SimpleNamespace(
        num_heads=3, W_q=Foreign(weights.W_q), W_k=Foreign(weights.W_k), W_v=Foreign(weights.W_v), W_o=Foreign(weights.W_o),
        b_o=Foreign(weights.b_o), forward=lambda query, key, value: weights.forward(query, key, value),
    )  # fmt: skip
    assert_agrees(given, allow_skipped=True)


def test_inputs_are_arrays_of_the_chosen_framework(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlx.core", SimpleNamespace(array=Foreign))

    def attend(query, key, value):
        assert all(isinstance(x, Foreign) for x in (query, key, value)) and query.dtype == "foreign.core.float32"
        return Foreign(numpy_function(query.x, key.x, value.x))

    assert_agrees(attend, framework="mlx", allow_skipped=True)


SIZES = {"d_model": 12, "num_heads": 4}
GROUPED = {"d_model": 13, "num_heads": 6, "num_kv_heads": 2, "head_dim": 11, "bias": False}
ROTARY = {"theta": 500, "dims": 10, "attention_factor": 1.5}
LLAMA3 = {"type": "llama3", "factor": 4, "original_max_position": 20}
LAYERS = [
    LayerSpec(**SIZES),
    LayerSpec(**GROUPED, rope=ROTARY | {"scaling": LLAMA3}, qk_norm={"weights": "own"}, window={"left": 4}, softcap=2, scale=0.5),
    LayerSpec(**GROUPED, rope=ROTARY | {"interleaved": True}, qk_norm={"weights": "own", "over": "all", "after_rope": True}),
    LayerSpec(**SIZES, output_gate={}, alibi=True, sinks=True),
    LayerSpec(**SIZES, relative_bias={}, chunk_size=5, query_scale={"factor": 0.5, "length": 3}),
    LayerSpec(**SIZES, normalizer="sigmoid", grid_bias={"height": 3, "width": 5}),
    LayerSpec(d_model=12, num_heads=2, rope={}, talking_heads=True),
    LayerSpec(d_model=12, num_heads=2, forget_gate=True),
    LayerSpec(**SIZES, scale=0.9, rope={"dims": 2}, latent={"query_rank": 7, "key_value_rank": 5, "rope_key_dim": 2}),
    LayerSpec(d_model=12, num_heads=3, alibi=True),
    LayerSpec(d_model=12, num_heads=3, block_selection={"block_size": 2, "top_k": 1}),
]


CANDIDATES = [{}, {"causal": True, "decodes": True}, {"causal": True, "at_end": True}, {"batched": False}]


MASK_OF: dict[CaseKind, str] = {"mask": "mask", "causal": "mask", "padding": "padding", "numbers": "mask"}


@functools.cache
def right_computations(layer, candidate, seed, is_whole=False):
    """The computations of the reference for the short cases, or all, and what they return; made once, since hundreds of mistakes are tried
    on them."""
    spec, options = LAYERS[layer], dict(CANDIDATES[candidate])
    weights = draw_weights(DrawValues(np.random.default_rng(0)), spec, ["weights"])
    decodes, lengths = options.pop("decodes", False), lengths_for(spec, batched=options.pop("batched", True))
    draw = Draw(spec=spec, weights=weights, rng=np.random.default_rng(seed), lengths=lengths, **options)
    cases = [*draw_short_cases(draw, decodes=decodes)]
    if is_whole:
        names = {role: role for role in ("padding", "softcap", "window")}
        cases += [*draw_parameter_cases(draw, names, MASK_OF, is_torch=False, adds_numbers=True), *draw_long_cases(draw, decodes=decodes)]
    computations = [Computation(case.layer(spec), weights, case) for case in cases]
    return [(right, right.run()) for right in computations]


def observations(layer, candidate, seed, change, is_whole=False):
    """What a candidate with this mistake returns in each case; it raises where the mistake has no shape."""
    for right, expected in right_computations(layer, candidate, seed, is_whole):
        got = expected
        try:
            got = change(right).run()
        except Impossible:
            pass
        except ValueError:
            continue
        agrees = all(x.shape == expected.outputs[name].shape and expected.agrees(name, x) for name, x in got.outputs.items())
        yield Observation(right, got.outputs, agrees)


def test_every_known_mistake_changes_a_case():
    left = {name: mistake.change for rows in MISTAKES.values() for name, mistake in rows.items()}
    for is_whole in (False, True):  # few show in long cases or with further arguments alone
        for layer, candidate in itertools.product(range(len(LAYERS)), range(len(CANDIDATES))):
            for hint in list(left):
                if not all(x.agrees for x in observations(layer, candidate, 0, left[hint], is_whole)):
                    del left[hint]
    assert not left


def some_rows():
    """The first mistake of each kind, and the last one, which is slow."""
    for rows in MISTAKES.values():
        first, *_, last = (*rows, *rows)
        yield pytest.param(first, rows[first].change, id=first)
        if last != first:
            yield pytest.param(last, rows[last].change, id=last, marks=pytest.mark.slow)


@pytest.mark.parametrize(("hint", "change"), list(some_rows()))
def test_known_mistakes_are_named_and_no_others(hint, change):
    """The reference makes the mistake in all cases. It is named, alone or with one that gives the same numbers in every case."""
    for is_whole, layer, candidate in itertools.product((False, True), range(len(LAYERS)), range(len(CANDIDATES))):
        if all(x.agrees for x in observations(layer, candidate, 0, change, is_whole)):
            continue
        observed = list(observations(layer, candidate, 0, change, is_whole))
        explanation = explain(observed, observations(layer, candidate, 1, change, True))  # long cases tell blocks of keys apart
        assert (hint,) in (explanation.mistakes, *explanation.equals)
        return
    pytest.fail("it changes no case")


def test_the_report_names_the_case_the_index_and_the_numbers():
    comparison = compare(type("Wrong", (Wrong,), {"scale": lambda self, s: s}), mask_means="attend")
    lines = str(comparison).splitlines()
    assert lines[0] == "disagrees with the reference in 13 of 14 cases"
    assert lines[1].startswith("first wrong step: scaled_products: ") and lines[2].endswith("scores = self.scale(q @ k.transpose(-2, -1))")
    lines = [lines[0], *lines[3:]]
    assert lines[1] == "hint: this is what comes out when the scores are not divided by sqrt(head_dim)"
    assert lines[2:4] == ["  you compute: softmax(Q Kᵀ) V", "  expected:    softmax(Q Kᵀ / √d) V"]
    first = comparison.first
    place = "no mask, output[0, 0, 0] (item 0, query 0, number 0)"
    assert " ".join(lines[4:6]) == f"first disagreement: {place}: expected {first.expected}, got {first.got}"
    assert [line[:28].strip() for line in lines[6:]] == [result.case for result in comparison.results]
    assert "DISAGREES" in lines[6] and all(len(line) <= 80 for line in lines)
    assert float(first.expected) != float(first.got)
    with pytest.raises(AssertionError, match="first disagreement: no mask, output"):
        assert_agrees(type("Wrong", (Wrong,), {"scale": lambda self, s: s}), mask_means="attend")
    right = compare(Wrong, mask_means="attend", longest=7)
    assert right.conclusion == "agrees with the reference, with up to 7 keys, in float32, and with mask"


def test_a_notebook_shows_the_report():
    html = compare(type("Wrong", (Wrong,), {"scale": lambda self, s: s}), mask_means="attend")._repr_html_()
    assert html.startswith("<pre>disagrees with the reference in 13 of 14 cases\n") and html.count("<") == 2


def test_every_mistake_has_its_arithmetic_on_a_line_of_80_columns():
    right = right_computations(0, 0, 0)[0][0].with_scale(0.9)
    for rows in MISTAKES.values():
        for name, mistake in rows.items():
            computed, expected = mistake.arithmetic(right)
            assert computed != expected, name
            assert max(len(f"  you compute: {computed}"), len(f"  expected:    {expected}")) <= 80, name


def test_the_arithmetic_has_the_scale_of_the_layer_and_the_mask_of_the_case():
    spec = LayerSpec(d_model=12, num_heads=3, projections=False, scale=0.9)

    def unscaled(query, key, value, attend_mask=None):
        scores = query @ key.transpose(-1, -2)
        return (scores if attend_mask is None else scores.masked_fill(~attend_mask, -torch.inf)).softmax(-1) @ value

    def unmasked(query, key, value, attend_mask=None):
        return (0.9 * query @ key.transpose(-1, -2)).softmax(-1) @ value

    first = compare(unscaled, spec=spec, framework="torch").first
    assert first.explanation.arithmetic == (("softmax(Q Kᵀ) V", "softmax(Q Kᵀ · 0.9) V"),)
    assert compare(unmasked, spec=spec, framework="torch").first.explanation.arithmetic[0][0] == "softmax(S) V"


def test_the_index_of_one_wrong_number_is_reported():
    def forward(self, query, key, value):
        output, weights = Wrong.forward(self, query, key, value)
        weights[1, 2, 3, 4] += 0.25
        return output, weights

    first = compare(type("Nudged", (Wrong,), {"forward": forward})).first
    assert (first.case, first.output, first.index, first.mistakes) == ("no mask", "attention_weights", (1, 2, 3, 4), ())
    assert float(first.got) == pytest.approx(float(first.expected) + 0.25)


def test_results_that_change_from_call_to_call_are_not_explained_but_said_to_change():
    dropped = type("Dropped", (Wrong,), {"softmax": lambda self, s: functional.dropout(s.softmax(-1), 0.1)})
    first = compare(dropped, mask_means="attend").first
    assert first.hint.startswith("a second call with the same inputs returns other numbers: dropout is active") and not first.mistakes


class DropsOut(FromScratch):
    """Dropout of the outputs that knows of no evaluation mode."""

    def __init__(self, d_model, num_heads, dropout=0.2):
        super().__init__(d_model, num_heads, dropout)
        self.rate = dropout

    def forward(self, query, key, value, mask=None):
        return functional.dropout(super().forward(query, key, value, mask)[0], self.rate)


class DropsOutAsRequired(DropsOut):
    def __init__(self, d_model, num_heads, dropout):
        super().__init__(d_model, num_heads, dropout)


@pytest.mark.parametrize("candidate", [DropsOut, DropsOutAsRequired])
def test_a_class_is_constructed_with_dropout_so_that_it_shows_if_it_acts_in_evaluation_mode(candidate):
    assert "dropout is active" in compare(candidate, mask_means="attend").first.hint
    assert_agrees(candidate, mask_means="attend", construct={"dropout": 0})


def test_a_class_without_an_evaluation_mode_is_constructed_without_dropout():
    class Dropped(NumPyAttention):
        def __init__(self, d_model, num_heads, dropout=0.2):
            super().__init__(d_model, num_heads)
            self.dropout = dropout

        def forward(self, query, key, value, mask=None):
            output, _ = super().forward(query, key, value, mask)
            return output * (np.random.default_rng().random(output.shape) >= self.dropout)

    assert_agrees(Dropped, mask_means="block")


def test_nan_is_a_disagreement():
    nan = type("NaN", (Wrong,), {"scale": lambda self, s: s * torch.nan})
    assert compare(nan, mask_means="attend").results[0].error == np.inf


def test_an_exception_is_reported_with_the_arguments_of_the_call():
    comparison = compare(Annotated, mask_means="attend", mask_shape="q,k")  # which takes its mask as [b, q, k]
    assert comparison.first.case == "mask"
    assert (
        "called with query [2, 5, 12] float32, key [2, 5, 12] float32, value [2, 5, 12] float32, mask [5, 5] bool" in comparison.first.got
    )
    assert "mask_shape" in comparison.first.hint


def test_the_tolerance_is_an_option():
    rough = type("Rough", (Wrong,), {"scale": lambda self, s: Wrong.scale(self, s).half().float()})
    assert not compare(rough, mask_means="attend").agrees
    assert_agrees(rough, mask_means="attend", tolerance=1e-3)


def test_tolerances_grow_with_scores_and_outputs():
    unit = {"float32": 2.0**-23, "float64": 2.0**-52}
    scores, output = np.array([-20.0, 3.0, -np.inf]), np.array([4.0, -np.inf])
    assert tolerance(output, "float32", scores) == 16 * unit["float32"] * 20 * 4
    assert tolerance(output, "float32", scores, logarithmic=True) == 80 * unit["float32"] * 20
    assert tolerance(output, "float64", scores, norm=True) == 80 * unit["float64"] * 20 * 4
    assert tolerance(output, "float64", 20.0, relative=1e-3) == pytest.approx(1e-3 * 20 * 4)
    assert tolerance(output, "float32", 0.1) == 16 * unit["float32"] * 4


# --- ambiguous candidates ---------------------------------------------------------------------------------------------------------------


def fails(q, k, v):
    return 1 / 0


class Unguessable(FromScratch):
    def __init__(self, d_model, num_heads, wisdom):
        super().__init__(d_model, num_heads)
        wisdom.apply(self)


class Layer(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return self.norm(self.attention(x, x, x)[0])


class TwoQueries(Wrong):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.query = nn.Linear(d_model, d_model)


AMBIGUOUS = {
    "constructor": (Unguessable, {}, "ambiguous: the value of constructor parameter 'wisdom'; pass construct="),
    "no query": (lambda mask=None: mask, {"framework": "torch"}, "is the query; pass arguments="),
    "two queries": (lambda x, q, k: x, {"framework": "torch"}, "which is the query, 'x' or 'q'"),
    "no such role": (methods_only, {"framework": "torch", "arguments": {"q": "question"}}, "question"),
    "no such parameter": (methods_only, {"framework": "torch", "arguments": {"z": "query"}}, "'z'"),
    "framework": (fails, {}, r'pass framework="torch" or "numpy"; with numpy, it raised ZeroDivisionError.*; with torch, it raised'),
    "more than attention": (Layer, {}, "'norm.weight'"),
    "two weights": (TwoQueries, {"mask_means": "attend"}, "ambiguous: which is the weight of query"),
    "unknown layers": (Lettered, {}, r"the meaning of 'a.weight'.* pass weights=.* among a.weight \[12, 12\], a.bias \[12\]"),
    "unknown arrays": (NumPyLettered, {}, r"which arrays are the weights; pass weights=\{\} if none are, .* among M1 \[12, 12\], M2"),
    "a name that is none": (Lettered, {"weights": {"query": "alpha"}}, "what 'query': 'alpha' in weights names"),
    "a value that is none": (Lettered, {"fused": "q,k"}, "expected fused to be q,k,v or per_head or .*, got 'q,k'"),
    "text for a number": (Lettered, {"num_heads": "three"}, "expected num_heads to be an integer, got 'three'"),
    "missing weight": (nn.Linear(12, 12), {}, "found no weight|ambiguous"),
    "missing matrix": (lambda x, W_q, W_k: x, {"framework": "numpy", "num_heads": 2, "orientation": "in,out"}, "found no weight of value"),
    "other heads of a class": (FromScratch, {"mask_means": "attend", "num_heads": 5}, "divides 12, got 5"),
    "other heads": (FromScratch(12, 3), {"mask_means": "attend", "num_heads": 5}, "divides 12, got 5"),
    "wrong weights": (NumPyAttention, {"mask_means": "block", "weights": GIVEN_WEIGHTS | {"key.bias": np.ones(3)}}, "expected key.bias"),
    "nothing to call": (SimpleNamespace(W_q=np.eye(2), W_k=np.eye(2), W_v=np.eye(2)), {}, "pass method="),
    "no name": ("no_colon", {}, "expected my_package.my_module:MyAttention"),
    "nothing of that name": ("numpy:MyAttention", {}, "'MyAttention'"),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_candidates_are_refused_with_the_option_that_decides(name):
    candidate, options, message = AMBIGUOUS[name]
    with pytest.raises(ValueError, match=message):
        compare(candidate, **options)


def test_options_map_parameters_to_roles():
    assert_agrees(NumPyAttention(12, 3), mask_means="block", method="forward")
    with pytest.raises(TypeError, match="mask_meaning"):
        compare(positional, mask_meaning="attend")
    with pytest.raises(ValueError, match="expected an array or a tuple"):
        compare(lambda q, k, v: {"output": q}, framework="torch")


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_case_that_rounding_may_change_as_much_shows_nothing(factor):
    """Large logits in float16, whether the candidate is right or wrong."""

    def candidate(q, k, v):
        q, k, v = (torch.from_numpy(x).half() for x in (q, k, v))
        return (factor * (q @ k.mT).float() / q.shape[-1] ** 0.5).softmax(-1).half() @ v

    comparison = compare(candidate, longest=7)
    found = {result.case: result for result in comparison.results}
    assert found["large logits"].agrees is None and "shows nothing" in str(found["large logits"])
    assert found["no mask"].agrees is (factor == 1.0)
    if factor == 1.0:
        assert "agrees with the reference in all 3 cases that show anything, with up to 7 keys, " in comparison.conclusion
        assert "nothing is shown by large logits" in comparison.conclusion
    else:
        assert comparison.verdict == "disagrees with the reference in 2 of 2 cases"
