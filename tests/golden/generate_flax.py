"""Flax' MultiHeadDotProductAttention (linen) and MultiHeadAttention (nnx), with and without norms on queries and keys. Needs jax and flax.

Masks of Flax say what may be attended; linen shows its weights by sowing them, nnx likewise.
"""

import flax
import jax
import jax.numpy as jnp
import numpy as np
from casefile import case, draw, draw_all, save
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict

VERSIONS = {"flax": flax.__version__, "jax": jax.__version__}
MASK = np.array([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0]], bool)


def linen_case(about, layer, params, query, key, value, mask):
    mask = None if mask is None else mask[None, None]
    output, state = layer.apply(unflatten_dict(params, sep="/"), query, key, value, mask=mask, sow_weights=True, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    request = {"query": query, "fully_masked": "uniform", "attend_mask": None if mask is None else mask[0, 0].astype(int).tolist()}
    if key is not query:
        request.update(key=key, value=value)
    return case(about, {}, request, np.asarray(output), np.asarray(weights))


def from_linen():
    """Flax wants keys and values of one width per head, but takes other widths in and gives another out."""
    query, key, value = draw(1, 2, 3, 5), draw(2, 2, 7, 11), draw(3, 2, 7, 13)
    options = {"flax": {}, "flax_qk_norm": {"normalize_qk": True}, "flax_no_bias": {"use_bias": False}}
    for name, more in options.items():
        layer = linen.MultiHeadDotProductAttention(num_heads=3, qkv_features=6, out_features=17, **more)
        shapes = {name: x.shape for name, x in flatten_dict(layer.init(jax.random.PRNGKey(0), query, key, value), sep="/").items()}
        params = draw_all(13, shapes)
        cases = [
            linen_case("widths all different", layer, params, query, key, value, None),
            linen_case("with a mask, one row of it empty", layer, params, query, key, value, MASK),
        ]
        save(name, f"linen.MultiHeadDotProductAttention {more or ''}".strip(), VERSIONS, params, cases)


def from_nnx():
    query = draw(4, 2, 5, 7)
    layer = nnx.MultiHeadAttention(
        num_heads=3, in_features=7, qkv_features=15, out_features=11, decode=False, rngs=nnx.Rngs(0), normalize_qk=True
    )
    state = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    drawn = draw_all(14, {"/".join(path): tuple(x.shape) for path, x in state})
    nnx.update(layer, nnx.from_flat_state([(path, x.replace(jnp.asarray(drawn["/".join(path)]))) for path, x in state]))
    causal = jnp.tril(jnp.ones((5, 5), bool))[None, None]
    output = layer(jnp.asarray(query), mask=causal, sow_weights=True)
    (weights,) = layer.attention_weights.get_value()
    cases = [case("causal", {}, {"query": query, "causal": True}, np.asarray(output), np.asarray(weights))]
    save("flax_nnx", "nnx.MultiHeadAttention with norms", VERSIONS, drawn, cases)


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    from_linen()
    from_nnx()
