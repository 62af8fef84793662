"""torch.nn.MultiheadAttention, alone and inside Transformer layers, on its slow path with weights per head. Needs torch.

torch's masks say what is blocked; the cases hold what may be attended.
"""

import torch
from casefile import case, draw, draw_all, save
from torch import nn

VERSIONS = {"torch": torch.__version__.partition("+")[0]}
ATTEND_KEYS = [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
ATTEND_MASK = [[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0]]


def fill(module):
    drawn = draw_all(8, {name: tuple(x.shape) for name, x in module.named_parameters()})
    for name, parameter in module.named_parameters():
        parameter.data = torch.from_numpy(drawn[name])
    return module.eval()


def checkpoint(module):
    return {name: x.numpy() for name, x in module.state_dict().items()}


def call(about, mha, prefix, query, key=None, value=None, attend_keys=None, attend_mask=None, causal=False):
    """One case of a module; keys and values default as in a request."""
    key = query if key is None else key
    value = key if value is None else value
    blocked = None if attend_mask is None else ~torch.tensor(attend_mask, dtype=torch.bool)
    if causal:
        blocked = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
    padding = None if attend_keys is None else ~torch.tensor(attend_keys, dtype=torch.bool)
    with torch.no_grad():
        tensors = (torch.from_numpy(x) for x in (query, key, value))
        output, weights = mha(*tensors, attn_mask=blocked, key_padding_mask=padding, average_attn_weights=False)
    request = {"query": query, "attend_keys": attend_keys, "attend_mask": attend_mask, "causal": causal or None}
    if key is not query:
        request["key"] = key
    if value is not key:
        request["value"] = value
    load = {"prefix": prefix, "spec": {"num_heads": mha.num_heads}}
    return case(about, load, request, output.numpy(), weights.numpy())


def modules():
    packed = fill(nn.MultiheadAttention(15, 3, batch_first=True))
    query, other = draw(1, 2, 3, 15), draw(2, 2, 7, 15)
    cases = [
        call("self-attention, causal", packed, "", other, causal=True),
        call("keys from elsewhere, both masks", packed, "", query, other, attend_keys=[[1] * 7, ATTEND_KEYS[1]], attend_mask=ATTEND_MASK),
    ]
    save("torch_mha", "nn.MultiheadAttention, its projections packed", VERSIONS, checkpoint(packed), cases)

    separate = fill(nn.MultiheadAttention(15, 5, batch_first=True, kdim=11, vdim=13))
    arrays = draw(3, 2, 3, 15), draw(4, 2, 7, 11), draw(5, 2, 7, 13)
    cases = [call("keys and values of other widths, padded", separate, "", *arrays, attend_keys=ATTEND_KEYS)]
    save("torch_mha_kdim_vdim", "nn.MultiheadAttention with kdim and vdim: biases still packed", VERSIONS, checkpoint(separate), cases)

    bare = fill(nn.MultiheadAttention(14, 2, bias=False, batch_first=True))
    cases = [call("no biases", bare, "", draw(6, 2, 5, 14))]
    save("torch_mha_no_bias", "nn.MultiheadAttention without biases", VERSIONS, checkpoint(bare), cases)


def transformer():
    model = fill(nn.Transformer(15, 3, 1, 1, dim_feedforward=13, batch_first=True))
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    memory, target = draw(7, 2, 7, 15), draw(8, 2, 4, 15)
    cases = [
        call("the encoder's layer, padded", encoder.self_attn, "encoder.layers.0", memory, attend_keys=ATTEND_KEYS),
        call("the decoder's own, causal", decoder.self_attn, "decoder.layers.0.self_attn", target, causal=True),
        call(
            "the decoder's to the encoder",
            decoder.multihead_attn,
            "decoder.layers.0.multihead_attn",
            target,
            memory,
            attend_keys=ATTEND_KEYS,
        ),
    ]
    save("torch_transformer", "nn.Transformer: encoder and decoder layers", VERSIONS, checkpoint(model), cases)


if __name__ == "__main__":
    torch.set_num_threads(1)
    modules()
    transformer()
