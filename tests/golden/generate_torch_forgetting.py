"""Forgetting attention as its paper defines it (Lin et al. 2025, arXiv 2503.02130, equation 3), in float64. Needs torch.

The weights have the names of the authors' code (`fgate_proj`). It multiplies exp(scores) by products of gates, where the service adds
logarithms: O_i = Σ_j F_ij exp(q_i·k_j) v_j / Σ_j F_ij exp(q_i·k_j) with F_ij = f_i f_(i-1) … f_(j+1).
"""

import torch
from casefile import case, draw, draw_all, save

HEADS, WIDTH, LENGTH = 3, 15, 7


def main():
    torch.set_num_threads(1)
    shapes = {f"{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"} | {"fgate_proj.weight": (HEADS, WIDTH), "fgate_proj.bias": (HEADS,)}
    weights = {f"model.layers.1.attn.{name}": x for name, x in draw_all(31, shapes, 0.3).items()}
    x = draw(32, 2, LENGTH, WIDTH)
    output, attention_weights = attend(
        torch.from_numpy(x).double(), lambda name: torch.from_numpy(weights[f"model.layers.1.attn.{name}"]).double()
    )
    load = {"prefix": "model.layers.1", "spec": {"rope": None}}
    results = (one.float().numpy() for one in (output, attention_weights))
    cases = [case("a causal call", load, {"query": x, "causal": True}, *results)]
    versions = {"torch": torch.__version__.partition("+")[0]}
    save("torch_forgetting", "Forgetting attention by its definition, with the authors' names of tensors", versions, weights, cases)


def attend(x, weight):
    q, k, v = ((x @ weight(f"{name}_proj.weight").T).view(2, LENGTH, HEADS, -1) for name in "qkv")
    gates = torch.sigmoid(x @ weight("fgate_proj.weight").T + weight("fgate_proj.bias"))  # [b, n, heads]
    attention_weights = torch.zeros(2, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    outputs = torch.zeros(2, LENGTH, HEADS, WIDTH // HEADS, dtype=torch.float64)
    for b in range(2):
        for h in range(HEADS):
            for i in range(LENGTH):
                scores = [q[b, i, h] @ k[b, j, h] / (WIDTH // HEADS) ** 0.5 for j in range(i + 1)]
                shares = [gates[b, j + 1 : i + 1, h].prod() * torch.exp(score) for j, score in enumerate(scores)]
                attention_weights[b, h, i, : i + 1] = torch.stack(shares) / sum(shares)
                outputs[b, i, h] = attention_weights[b, h, i] @ v[b, :, h]
    return outputs.flatten(2) @ weight("o_proj.weight").T, attention_weights


if __name__ == "__main__":
    main()
