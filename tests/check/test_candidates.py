"""`compare`: correct candidates agree in every convention, and what is ambiguous is refused with the option that decides."""

import functools
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attend.check import assert_agrees, compare
from attend.spec import LayerSpec
from support.candidates import (
    GIVEN_WEIGHTS,
    Annotated,
    FromScratch,
    NumPyAttention,
    Wrong,
    function_of_matrices,
    merge,
    methods_only,
    numpy_function,
    positional,
    scaled_dot_product,
    softmax,
    split,
)


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
    comparison = compare(candidate, longest=33, **options)
    assert comparison.agrees, f"\n{comparison}"
    assert not all(result.skipped for result in comparison.results)


class ScaledRotary(nn.Module):
    """RoPE with Llama 3.1's frequencies, whose context in training is a size of the spec and not the longest call."""

    def __init__(self, d_model, num_heads, original_max_position=16):
        super().__init__()
        self.num_heads, self.context = num_heads, original_max_position
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def rotate(self, x):
        frequencies = 10000.0 ** (-torch.arange(0, x.shape[3], 2) / x.shape[3])
        kept = ((self.context * frequencies / (2 * math.pi) - 1) / 3).clamp(0, 1)
        angles = torch.arange(x.shape[2])[:, None] * (kept + (1 - kept) / 8) * frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)

    def forward(self, x):
        q, k, v = (split(layer(x), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q), self.rotate(k)
        return self.o_proj(merge(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))


def test_a_class_gets_the_context_of_its_training_from_the_spec_and_angles_may_be_of_float32():
    scaling = {"type": "llama3", "factor": 8, "original_max_position": 16}
    spec = LayerSpec(d_model=24, num_heads=3, bias=False, rope={"interleaved": False, "scaling": scaling})
    comparison = compare(ScaledRotary, spec=spec, causal=True)
    assert comparison.agrees and "up to 4,097 keys" in comparison.conclusion, f"\n{comparison}"


def _skipped(candidate, **options):
    return {result.case for result in compare(candidate, longest=7, **options).results if result.skipped}


def test_weights_of_one_head_may_lack_the_head_axis():
    assert_agrees(OneHead, allow_skipped=True, longest=7)


def test_cases_that_a_candidate_cannot_run_are_reported_with_the_reason():
    masked = {"mask", "cross-attention with a mask"}
    cross = {"cross-attention", "cross-attention with a mask"}
    assert _skipped(FromScratch, mask_means="attend") == set()
    assert _skipped(functional.scaled_dot_product_attention) <= {"is_causal=True with a causal mask"}  # torch may take both
    assert _skipped(nn.MultiheadAttention) == {"is_causal=True", "is_causal=True with padded keys"}
    assert _skipped(DiveIntoDeepLearning) == masked | {"causal mask", "packed sequences"}
    with_values = (", causal=True", ", softmax_scale=0.3", ", softmax_scale=0.3, 1 query")
    groups = {f"6 heads, 3 of keys{more}" for more in ("", ", 1 query", *with_values)}
    assert _skipped(flash_like, layout="b,n,h,d") == masked | {"padded keys", "packed sequences"} | groups
    assert _skipped(PackedPerHead, mask_means="attend", fused="per_head") == cross
    assert "not run: it takes one input" in str(compare(PackedPerHead, mask_means="attend", fused="per_head", longest=7))


def test_the_comparison_does_not_change_the_module():
    module = FromScratch(12, 3)
    module.W_q.eval()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    assert_agrees(module, mask_means="attend", longest=7)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_constructing_a_class_keeps_the_random_state_and_makes_biases_nonzero():
    state = torch.get_rng_state()
    assert_agrees(nn.MultiheadAttention, longest=7)
    assert torch.equal(torch.get_rng_state(), state)

    class ZeroesBiases(nn.MultiheadAttention):
        def forward(self, query, key, value):
            self.in_proj_bias.zero_()
            return super().forward(query, key, value)[0]

    assert not compare(ZeroesBiases, longest=7).agrees


def test_comparing_numpy_candidates_does_not_import_torch():
    program = """if True:
        import sys
        import numpy as np
        from attend.check import compare

        def attend(query, key, value):
            e = np.exp(query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5)
            return e / e.sum(-1, keepdims=True) @ value

        with np.errstate(all="ignore"):
            comparison = compare(attend, longest=7)
        assert comparison.first.case == "large logits" and "exp overflows" in comparison.first.hint, comparison
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("fused", "heads"), [("q,k,v", 4), ("per_head", 3)])
def test_a_packed_matrix_that_is_cut_in_another_order_is_named(fused, heads):
    candidate = PackedPerHead(12, 12, heads) if fused == "q,k,v" else CausalSelfAttention(SimpleNamespace(n_head=heads, n_embd=12))
    options = {} if fused == "q,k,v" else {"causal": True, "weights": {"qkv": "c_attn", "output": "c_proj"}}
    first = compare(candidate, mask_means="attend", fused=fused, longest=7, **options).first
    assert len(first.mistakes) == 1 and "is cut as [" in first.hint and "see fused" in first.hint


def test_the_candidate_without_mistakes_agrees():
    assert_agrees(Wrong, mask_means="attend", longest=7)


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

    assert_agrees(Attention, mask_means="block", longest=7)
    weights = NumPyAttention(12, 3)
    given = SimpleNamespace(
        num_heads=3, W_q=Foreign(weights.W_q), W_k=Foreign(weights.W_k), W_v=Foreign(weights.W_v), W_o=Foreign(weights.W_o),
        b_o=Foreign(weights.b_o), forward=lambda query, key, value: weights.forward(query, key, value),
    )  # fmt: skip
    assert_agrees(given, allow_skipped=True, longest=7)


def test_inputs_are_arrays_of_a_framework_that_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlx.core", SimpleNamespace(array=Foreign))

    def attend(query, key, value):
        assert all(isinstance(x, Foreign) for x in (query, key, value)) and query.dtype == "foreign.core.float32"
        return Foreign(numpy_function(query.x, key.x, value.x))

    assert_agrees(attend, allow_skipped=True, longest=7)


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
    assert "dropout is active" in compare(candidate, mask_means="attend", longest=7).first.hint
    assert_agrees(candidate, mask_means="attend", construct={"dropout": 0}, longest=7)


def test_a_class_without_an_evaluation_mode_is_constructed_without_dropout():
    class Dropped(NumPyAttention):
        def __init__(self, d_model, num_heads, dropout=0.2):
            super().__init__(d_model, num_heads)
            self.dropout = dropout

        def forward(self, query, key, value, mask=None):
            output, _ = super().forward(query, key, value, mask)
            return output * (np.random.default_rng().random(output.shape) >= self.dropout)

    assert_agrees(Dropped, mask_means="block", longest=7)


def fails(q, k, v):
    return 1 / 0


class Unguessable(FromScratch):
    def __init__(self, d_model, num_heads, wisdom):
        super().__init__(d_model, num_heads)
        wisdom.apply(self)


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
    "two weights": (TwoQueries, {"mask_means": "attend"}, "ambiguous: which is the weight of query"),
    "a name that is none": (Lettered, {"weights": {"query": "alpha"}}, "what 'query': 'alpha' in weights names"),
    "a value that is none": (Lettered, {"fused": "q,k"}, "expected fused to be q,k,v or per_head or .*, got 'q,k'"),
    "text for a number": (Lettered, {"num_heads": "three"}, "expected num_heads to be an integer, got 'three'"),
    "missing weight": (nn.Linear(12, 12), {}, "found no weight|ambiguous"),
    "missing matrix": (lambda x, W_q, W_k: x, {"framework": "numpy", "num_heads": 2, "orientation": "in,out"}, "found no weight of value"),
    "other heads of a class": (FromScratch, {"mask_means": "attend", "num_heads": 5, "d_model": 12}, "divides 12, got 5"),
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
    assert_agrees(NumPyAttention(12, 3), mask_means="block", method="forward", longest=7)
    with pytest.raises(TypeError, match="mask_meaning"):
        compare(positional, mask_meaning="attend")
    with pytest.raises(ValueError, match="expected an array or a tuple"):
        compare(lambda q, k, v: [None, q], framework="torch")


def test_a_function_that_constructs_a_module_is_not_called_with_arrays() -> None:
    def build(embed_dim: int, num_heads: int, bias: bool = True) -> nn.Module:
        return nn.MultiheadAttention(embed_dim, num_heads, bias=bias)

    with pytest.raises(ValueError, match="it is a function that returns a MultiheadAttention: pass that class, or what it returns"):
        compare(build)
