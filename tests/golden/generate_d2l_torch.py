"""Dive into Deep Learning's multi-head attention in PyTorch, written from the book's definition. Needs torch; see d2l_cases.py."""

import math

import d2l_cases
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias)

    def forward(self, queries, keys, values, valid_lens):
        q, k, v = (self.into_heads(x) for x in (self.W_q(queries), self.W_k(keys), self.W_v(values)))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if valid_lens is not None:
            lens = valid_lens if valid_lens.dim() == 2 else valid_lens[:, None].expand(-1, queries.shape[1])
            lens = torch.repeat_interleave(lens, self.num_heads, dim=0)[:, :, None]
            scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens, -1e6)
        self.attention_weights = torch.softmax(scores, dim=-1)
        return self.W_o(self.out_of_heads(torch.bmm(self.attention_weights, v)))

    def into_heads(self, x):
        """[b, n, heads * d] -> [b * heads, n, d]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).flatten(0, 1)

    def out_of_heads(self, x):
        """[b * heads, n, d] -> [b, n, heads * d]."""
        return x.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2)


def main():
    for bias in (False, True):
        layer = MultiHeadAttention(d2l_cases.NUM_HIDDENS, d2l_cases.NUM_HEADS, bias).eval()
        layer(*map(torch.from_numpy, d2l_cases.inputs()), None)  # lazy layers learn their widths
        drawn = {(name if "." in name else f"{name}.weight"): torch.from_numpy(x) for name, x in d2l_cases.weights(bias).items()}
        layer.load_state_dict(drawn)

        def compute(*arrays, layer=layer):
            with torch.no_grad():
                output = layer(*(None if x is None else torch.from_numpy(x) for x in arrays))
            return output.numpy(), layer.attention_weights.numpy()

        checkpoint = {name: x.numpy() for name, x in layer.state_dict().items()}
        d2l_cases.write_cases("torch", {"torch": torch.__version__.partition("+")[0]}, checkpoint, bias, compute)


if __name__ == "__main__":
    main()
