"""RemoteMultiheadAttention compared with a local `nn.MultiheadAttention` of the same seed: outputs, weights and gradients."""

import copy
import io
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attend.client import Client
from attend.client.remote import RemoteMultiheadAttention
from attend.errors import InvalidRequest, LayerConflict
from support.data_loader import Attended

WIDTH, HEADS, B, Q, K = 14, 2, 3, 5, 7
SEED = 11


@pytest.fixture(scope="module")
def client(server):
    """Restores the layers of the server, which other tests use."""
    with Client(server.url) as client:
        others = {layer.name for layer in client.layers()}
        for dtype in ("float32", "float64", "bfloat16"):
            client.put_layer(dtype, {"d_model": WIDTH, "num_heads": HEADS, "init": "torch_mha", "seed": SEED, "dtype": dtype})
        client.put_layer(
            "dims",
            {"d_model": WIDTH, "num_heads": HEADS, "key_dim": 6, "value_dim": 10, "init": "torch_mha", "seed": SEED, "dtype": "float64"},
        )
        yield client
        for layer in client.layers():
            if layer.name not in others:
                client.delete_layer(layer.name)


def local(dtype=torch.float64, **options):
    """The local module with the weights of the layer: drawn in float32, then cast."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.MultiheadAttention(WIDTH, HEADS, **options).to(dtype)


def inputs(batch_first, batched=True, widths=(WIDTH, WIDTH, WIDTH), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.randn((B, n, width), generator=generator, dtype=torch.float64).to(dtype) for n, width in zip((Q, K, K), widths, strict=True)
    ]
    if not batched:
        return [x[0] for x in made]
    return made if batch_first else [x.transpose(0, 1) for x in made]


PADDING = torch.zeros(B, K, dtype=torch.bool)
PADDING[0, 4:] = PADDING[2, :1] = True
BLOCKED = torch.triu(torch.ones(Q, K, dtype=torch.bool), 2)
PER_HEAD = torch.rand(B * HEADS, Q, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "padding added": {"key_padding_mask": torch.where(PADDING, -torch.inf, 0.25).double()},
    "blocked": {"attn_mask": BLOCKED},
    "added": {"attn_mask": PER_HEAD[0]},
    "added per head": {"attn_mask": PER_HEAD},
    "blocked per head": {"attn_mask": PER_HEAD > 0.8},
    "blocked and padding": {"attn_mask": BLOCKED, "key_padding_mask": PADDING},
    "both added": {"attn_mask": PER_HEAD, "key_padding_mask": torch.where(PADDING, -torch.inf, 0.0).double()},
    "causal hint": {"attn_mask": torch.triu(torch.ones(Q, K, dtype=torch.bool), 1), "is_causal": True},
}


def agree(remote, there, arguments, fields):
    """Outputs and weights of both, and the gradients of each input."""
    mine, theirs = ([x.detach().clone().requires_grad_() for x in arguments] for _ in range(2))
    got, expected = remote(*mine, **fields), there(*theirs, **fields)
    assert (got[1] is None) == (expected[1] is None)
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    direction = torch.linspace(-1, 1, expected[0].numel(), dtype=torch.float64).reshape(expected[0].shape)
    flows = zip(torch.autograd.grad(got[0], mine, direction), torch.autograd.grad(expected[0], theirs, direction), strict=True)
    for a, b in flows:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_mask_has_the_meaning_of_torch(client, batch_first, mask):
    remote = RemoteMultiheadAttention(client, "float64", batch_first=batch_first)
    there = local(batch_first=batch_first)
    for need, average in ((True, True), (True, False), (False, True)):
        fields = {**MASKS[mask], "need_weights": need, "average_attn_weights": average}
        agree(remote, there, inputs(batch_first), fields)


@pytest.mark.parametrize("mask", ["none", "padding", "padding added", "blocked", "added", "added per head", "both added"])
def test_an_unbatched_query_is_computed(client, mask):
    fields = {name: x[0] if name == "key_padding_mask" else x[:HEADS] if x.ndim == 3 else x for name, x in MASKS[mask].items()}
    remote = RemoteMultiheadAttention(client, "float64")
    for average in (True, False):
        agree(remote, local(), inputs(True, batched=False), {**fields, "average_attn_weights": average})


def test_keys_and_values_may_have_other_widths(client):
    remote = RemoteMultiheadAttention(client, "dims", batch_first=True)
    agree(remote, local(kdim=6, vdim=10, batch_first=True), inputs(True, widths=(WIDTH, 6, 10)), {})


def test_the_gradient_of_self_attention_sums_over_query_key_and_value(client):
    x = inputs(True)[0]
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    RemoteMultiheadAttention(client, "float64", batch_first=True)(mine, mine, mine)[0].square().sum().backward()
    local(batch_first=True)(theirs, theirs, theirs)[0].square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_gradients_are_those_of_finite_differences(client):
    remote = RemoteMultiheadAttention(client, "float64", batch_first=True)
    arguments = [x[:1, :2].requires_grad_() for x in inputs(True)]
    assert torch.autograd.gradcheck(lambda *x: remote(*x, need_weights=False)[0], arguments, fast_mode=True)


def test_a_layer_replaced_before_its_gradients_is_detected(client):
    """Gradients of other weights than those of the output would be silently wrong."""
    client.put_layer("moving", {"d_model": 6, "num_heads": 2, "seed": 1})
    query = torch.randn(2, 3, 6, requires_grad=True)
    output, _ = RemoteMultiheadAttention(client, "moving", batch_first=True)(query, query, query)
    client.put_layer("moving", {"d_model": 6, "num_heads": 2, "seed": 2})
    with pytest.raises(LayerConflict, match="replaced"):
        output.sum().backward()
    client.delete_layer("moving")


def test_only_the_required_gradients_are_requested(client):
    query, key, value = inputs(True)
    value.requires_grad_()
    output, _ = RemoteMultiheadAttention(client, "float64", batch_first=True)(query, key, value)
    output.sum().backward()
    assert value.grad is not None and query.grad is None


def test_mixed_dtypes_are_refused_as_torch_refuses_them(client):
    """Float64 in and out of a layer of float32 would look more exact than it is."""
    for dtype, layer in itertools.product((torch.float32, torch.float64, torch.bfloat16), ("float32", "float64", "bfloat16")):
        remote, there = RemoteMultiheadAttention(client, layer, batch_first=True), local(getattr(torch, layer), batch_first=True)
        arguments = inputs(True, dtype=dtype)
        if str(dtype) == f"torch.{layer}":
            output, weights = remote(*arguments)
            assert output.dtype == weights.dtype == dtype
            torch.testing.assert_close(output.float(), there(*arguments)[0].float(), rtol=0.05, atol=0.02)
            continue
        with pytest.raises(RuntimeError):
            there(*arguments)
        with pytest.raises(RuntimeError, match=f"expected torch.{layer}, the dtype of the layer, got {dtype}, at /query") as refused:
            remote(*arguments)
        assert isinstance(refused.value, InvalidRequest)


def test_each_input_has_the_dtype_of_the_layer(client):
    remote = RemoteMultiheadAttention(client, "float64", batch_first=True)
    for i, name in enumerate(("query", "key", "value")):
        for dtype in (torch.float32, torch.int64):
            arguments = [x.to(dtype) if i == j else x for j, x in enumerate(inputs(True))]
            with pytest.raises(RuntimeError, match=f"got {dtype}, at /{name}"):
                remote(*arguments)


def test_autocast_casts_all_dtypes_but_float64(client):
    """As torch does: a float32 layer gets the bfloat16 output of the module before it."""
    remote = RemoteMultiheadAttention(client, "float32", batch_first=True)
    expected = local(torch.float32, batch_first=True)(*inputs(True, dtype=torch.float32))[0]
    with torch.autocast("cpu", torch.bfloat16):
        output, weights = remote(*inputs(True, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="at /query"):
            remote(*inputs(True))
    assert output.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("hint", [False, True])
def test_masks_of_integers_are_refused_as_torch_refuses_them(client, mask, dtype, hint):
    """Torch would add them to the scores, so a padding mask of ones would block nothing."""
    fields = {"attn_mask": BLOCKED, "is_causal": hint, "need_weights": not hint, mask: (PADDING if "key" in mask else BLOCKED).to(dtype)}
    for module in (local(batch_first=True), RemoteMultiheadAttention(client, "float64", batch_first=True)):
        with pytest.raises(AssertionError) as refused:
            module(*inputs(True), **fields)
    [problem] = refused.value.problems
    assert (problem.at, problem.got) == (f"/{mask}", str(dtype)) and "torch.bool" in problem.expected


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 10}], ids=str)
def test_a_local_module_is_replaced_in_one_line(client, options):
    there = local(batch_first=True, **options)
    remote = RemoteMultiheadAttention.copy_of(there, client, "copied")
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    agree(remote, there, inputs(True, widths=widths), {"average_attn_weights": False})
    assert not list(remote.parameters()) and "copied" in repr(remote)


def test_dropout_in_training_drops_the_same_weights_in_both_passes(client):
    remote = RemoteMultiheadAttention(client, "float64", batch_first=True, dropout=0.5)
    query, key, value = inputs(True)
    value.requires_grad_()
    output, weights = remote(query, key, value, average_attn_weights=False)
    assert 0.2 < (weights == 0).double().mean() < 0.8
    gradient = torch.autograd.grad(output.sum(), value)[0]
    untouched = (weights == 0).all(dim=2)  # [b, h, k]: no query of the head attends to the key
    assert (gradient[untouched.all(dim=1)] == 0).all() and (gradient != 0).any()
    assert not torch.equal(remote(query, key, value)[0], output)
    remote.eval()
    torch.testing.assert_close(remote(query, key, value)[0], local(batch_first=True).eval()(query, key, value)[0], rtol=1e-9, atol=1e-12)


def test_rows_without_a_key_have_zero_weights(client):
    output, weights = RemoteMultiheadAttention(client, "float64", batch_first=True)(
        *inputs(True), key_padding_mask=torch.ones(B, K, dtype=torch.bool)
    )
    assert (weights == 0).all() and torch.equal(output, local().out_proj.bias.expand_as(output))


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"is_causal": True}, "/attn_mask"),
        ({"attn_mask": torch.zeros(Q, K, requires_grad=True)}, "/attn_mask"),
        ({"key_padding_mask": torch.zeros(B, K, requires_grad=True)}, "/key_padding_mask"),
        ({"attn_mask": torch.zeros(Q, K + 1, dtype=torch.bool)}, "/block_mask"),
    ],
)
def test_arguments_without_a_meaning_for_the_service_are_refused(client, fields, at):
    with pytest.raises(InvalidRequest) as refused:
        RemoteMultiheadAttention(client, "float64", batch_first=True)(*inputs(True), **fields)
    assert refused.value.problems[0].at == at


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_a_module_with_add_bias_kv_is_refused(client, options):
    with pytest.raises(InvalidRequest, match="add_bias_kv"):
        RemoteMultiheadAttention.copy_of(local(**options), client, "refused")


@pytest.mark.parametrize("module", [nn.Linear(3, 3), None, "attention"], ids=["linear", "none", "text"])
def test_only_attention_modules_are_copied(client, module):
    with pytest.raises(TypeError, match=f"expected a torch.nn.MultiheadAttention, got a {type(module).__name__}"):
        RemoteMultiheadAttention.copy_of(module, client, "refused")
    assert "refused" not in {layer.name for layer in client.layers()}


def test_a_remote_module_is_not_copied(client):
    """Its weights are in the service."""
    with pytest.raises(TypeError, match="got a RemoteMultiheadAttention"):
        RemoteMultiheadAttention.copy_of(RemoteMultiheadAttention(client, "float64"), client, "refused")


def test_each_pass_is_one_call(server):
    sent = []
    with Client(server.url) as client:
        client.http.event_hooks["request"] = [sent.append]
        x = torch.ones(1, 3, 64, requires_grad=True)
        RemoteMultiheadAttention(client, batch_first=True)(x, x, x)[0].sum().backward()
    assert [request.url.path for request in sent] == ["/attend", "/attend"]


def test_a_gradient_of_the_attention_weights_is_refused(client):
    """A loss that contains the weights would otherwise silently be minimised without them."""
    query, key, value = (x.requires_grad_() for x in inputs(True))
    remote = RemoteMultiheadAttention(client, "float64", batch_first=True)
    for loss in (lambda output, weights: weights.square().sum(), lambda output, weights: output.sum() + weights.max()):
        with pytest.raises(InvalidRequest, match=r"a loss of the output alone.*detach\(\)") as refused:
            loss(*remote(query, key, value)).backward()
        assert refused.value.problems[0].at == "/attention_weights" and query.grad is None
    output, weights = remote(query, key, value)
    (output.sum() + weights.detach().square().sum() + 0 * weights.sum()).backward()
    expected = torch.autograd.grad(local(batch_first=True)(query, key, value)[0].sum(), query)[0]
    torch.testing.assert_close(query.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", ["float64", "dims", "plain"])
def test_attributes_are_those_of_the_local_module(client, layer):
    options = {"dims": {"kdim": 6, "vdim": 10}, "plain": {"bias": False}}.get(layer, {})
    if layer == "plain":
        client.put_layer(layer, {"d_model": WIDTH, "num_heads": HEADS, "bias": False})
    there, remote = local(batch_first=True, dropout=0.1, **options), RemoteMultiheadAttention(client, layer, batch_first=True, dropout=0.1)
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "batch_first", "dropout", "add_zero_attn", "_qkv_same_embed_dim"):
        assert getattr(remote, name) == getattr(there, name), name
    for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v"):
        assert (getattr(remote, name) is None) == (getattr(there, name) is None), name
    assert (remote.out_proj.bias is None) == (there.out_proj.bias is None)


def test_attributes_follow_the_layer_of_the_server(client):
    """A layer that replaced it under its name may have other heads; its document is requested again only then."""
    fetched = []
    client.put_layer("moving", {"d_model": 6, "num_heads": 2})
    remote, x = RemoteMultiheadAttention(client, "moving", batch_first=True), torch.ones(1, 2, 6)
    remote.client = SimpleNamespace(attend=client.attend, layer=lambda name: fetched.append(name) or client.layer(name))
    for heads in (2, 3):
        client.put_layer("moving", {"d_model": 6, "num_heads": heads})
        for _ in range(2):
            remote(x, x, x)
            assert (remote.num_heads, remote.head_dim) == (heads, 6 // heads)
    assert fetched == ["moving"] * 2
    client.delete_layer("moving")


def test_access_to_the_weights_names_the_method_that_returns_them(client):
    remote = RemoteMultiheadAttention(client, "float64")
    with pytest.raises(AttributeError, match=r"no shape.*client\.layer_weights"):
        _ = remote.in_proj_weight.shape
    with pytest.raises(TypeError, match=r"client\.layer_weights"):
        torch.nn.functional.linear(torch.ones(WIDTH, dtype=torch.float64), remote.out_proj.weight)


def test_a_nested_tensor_is_refused(client):
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.zeros(2, WIDTH)])
    with pytest.raises(InvalidRequest, match="key_padding_mask"):
        RemoteMultiheadAttention(client, "float64", batch_first=True)(nested, nested, nested)


# --- in torch's own layers ------------------------------------------------------------------------------------------------------------


def encoder_layer(**options):
    """Torch's layer with the attention of the seed."""
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, dropout=0.0, dtype=torch.float64, **options)
    made.self_attn.load_state_dict(local().state_dict())
    return made


def swapped(layer, client, *names):
    """A copy of the layer with remote attention in these places."""
    layer = copy.deepcopy(layer)
    for name in names:
        there = getattr(layer, name)
        setattr(layer, name, RemoteMultiheadAttention(client, "float64", batch_first=there.batch_first).train(layer.training))
    return layer


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", [{"batch_first": True}, {"batch_first": False}, {"batch_first": True, "norm_first": True}], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"src_mask": torch.triu(torch.ones(K, K, dtype=torch.bool), 1), "is_causal": True},
        {"src_mask": nn.Transformer.generate_square_subsequent_mask(K, dtype=torch.float64)},
        {"src_key_padding_mask": PADDING},
        {"src_key_padding_mask": PADDING, "src_mask": torch.triu(torch.ones(K, K, dtype=torch.bool), 3)},
    ],
    ids=["none", "causal", "added", "padding", "both"],
)
def test_the_module_works_in_an_encoder_layer(client, options, training, fields):
    there = encoder_layer(**options).train(training)
    remote = swapped(there, client, "self_attn")
    x = inputs(options["batch_first"])[1]
    with torch.no_grad():
        torch.testing.assert_close(remote(x, **fields), there(x, **fields), rtol=1e-9, atol=1e-9)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for layer, given in ((remote, mine), (there, theirs)):
        layer(given, **fields).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(remote.linear1.weight.grad, there.linear1.weight.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_module_works_in_a_decoder_layer(client, training):
    there = nn.TransformerDecoderLayer(WIDTH, HEADS, 20, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    for attention in (there.self_attn, there.multihead_attn):
        attention.load_state_dict(local().state_dict())
    remote = swapped(there, client, "self_attn", "multihead_attn")
    target, memory, _ = inputs(True)
    causal = torch.triu(torch.ones(Q, Q, dtype=torch.bool), 1)
    for fields in ({}, {"tgt_mask": causal, "tgt_is_causal": True}, {"tgt_mask": causal, "memory_key_padding_mask": PADDING}):
        torch.testing.assert_close(remote(target, memory, **fields), there(target, memory, **fields), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # torch, once per process
@pytest.mark.parametrize("built", ["of copies", "afterwards"])
def test_the_module_works_in_an_encoder(client, built):
    """As torch builds it from copies of one layer, or with the attention of an existing encoder replaced."""
    there = nn.TransformerEncoder(encoder_layer(batch_first=True), 2).eval()
    if built == "of copies":
        remote = nn.TransformerEncoder(swapped(there.layers[0], client, "self_attn"), 2).eval()
    else:
        remote = copy.deepcopy(there)
        remote.layers = nn.ModuleList(swapped(layer, client, "self_attn") for layer in there.layers)
    x = inputs(True)[1]
    real = torch.arange(K) < torch.tensor([[4], [7], [5]])
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            torch.testing.assert_close(remote(x), there(x), rtol=1e-9, atol=1e-9)
            got, expected = (encoder(x, src_key_padding_mask=~real) for encoder in (remote, there))
        torch.testing.assert_close(got[real], expected[real], rtol=1e-9, atol=1e-9)  # torch's fast path leaves zeros elsewhere


def test_a_model_can_be_copied_pickled_and_saved(client):
    """Each calls the same service; an unpickled one opens its own connections."""
    model = nn.Sequential(swapped(encoder_layer(batch_first=True), client, "self_attn")).eval()
    x, saved = inputs(True)[1], io.BytesIO()
    expected = model(x)
    torch.save(model, saved)
    saved.seek(0)
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    for other in again:
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    assert again[0][0].self_attn.client is client and again[1][0].self_attn.client is not client
    for other in again[1:]:
        other[0].self_attn.client.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # which is what is tested
@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_the_module_works_in_the_workers_of_a_data_loader(client, start, workers):
    items = Attended(RemoteMultiheadAttention(client, "float64"), WIDTH)
    expected = torch.stack([items[i] for i in range(6)])  # over a connection that is open when workers begin
    loader = torch.utils.data.DataLoader(items, batch_size=3, num_workers=workers, multiprocessing_context=start)
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=1e-12, atol=1e-12)
