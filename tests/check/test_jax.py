"""Candidates of JAX: they are compiled whole where that is possible. Collected only where JAX is installed."""

import jax
import jax.numpy as jnp

from attend.check import compare


def attend(query, key, value):
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    return jax.nn.softmax(scores, axis=-1) @ value


def test_the_function_of_jax_agrees_in_both_alignments_that_it_may_have():
    comparison = compare("jax.nn:dot_product_attention", framework="jax", longest=33)
    assert comparison.agrees, f"\n{comparison}"
    assert {"is_causal", "scale", "mask"} <= {*comparison.tried}


def test_a_function_is_compiled_once_for_each_of_its_shapes():
    traced, computed = [], []

    def observed(query, key, value):
        output = attend(query, key, value)  # raises for groups of heads
        traced.append((query.shape, key.shape))
        jax.debug.callback(lambda: computed.append(1))
        return output

    assert compare(observed, framework="jax", longest=33).agrees
    assert len(traced) == len({*traced}) < len(computed)


def test_what_takes_arrays_of_numpy_is_compiled_too():
    calls = []

    def observed(query, key, value):
        output = attend(query, key, value)  # raises for groups of heads
        calls.append((query.shape, key.shape))
        return output

    comparison = compare(observed, framework="numpy", longest=33)
    assert comparison.agrees and comparison.dtype == "float32", f"\n{comparison}"
    assert len(calls) <= len({*calls}) + 3  # the first call of each adapter shows whose arrays it returns


def test_a_function_that_asks_for_numbers_is_called_without_compiling():
    def asks(query, key, value):
        return attend(query, key, value) if float(jnp.abs(query).sum()) else value

    assert compare(asks, framework="jax", longest=33).agrees


def test_a_mistake_is_named():
    def unscaled(query, key, value):
        return attend(query * query.shape[-1] ** 0.5, key, value)

    assert compare(unscaled, framework="jax", longest=33).first.mistakes == ("the scores are not divided by sqrt(head_dim)",)
