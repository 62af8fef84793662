"""The reference with places to change it: `check/changes.py` replaces methods of this layer in subclasses, to make mistakes.

It runs the steps of the layer's program, section by section. The methods stand for what people write wrongly: they have the arithmetic of
the steps, unless a subclass replaces them. Keys that share their rotary part (`latent`) are joined before RoPE, as most implementations do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from attend.attention.dataflow import needed
from attend.attention.operators.qk_norm import QKNorm, normalise
from attend.attention.operators.sinks import sum_with_sinks
from attend.attention.operators.step import Step
from attend.attention.program import sections_of
from attend.attention.reference.arithmetic import NumpyArithmetic
from attend.attention.reference.call import ReferenceCall
from attend.attention.reference.forward import Outputs, Values, features_of, inputs_of, named_outputs
from attend.spec import LayerSpec
from attend.tensors import Array

CAUSES = ("query", "key", "value")
F = TypeVar("F", bound=Callable[..., Any])


class Known:
    """What was computed first for a call, by what it is made of: layers with a mistake compute anew only what the mistake changes."""

    def __init__(self, *, is_complete: bool = False) -> None:
        self.results: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self.is_complete = is_complete  # what is computed later is not kept

    def result(self, compute: Callable[[], Any], *made_of: Any) -> Any:
        """What was computed of these objects, which are told apart by their identity."""
        key = tuple(map(id, made_of))
        if (known := self.results.get(key)) is not None:
            return known[1]
        result = compute()
        if not self.is_complete:
            self.results[key] = made_of, result  # as long as the objects are kept, no others have their ids
        return result


def reused(*uses: str) -> Callable[[F], F]:
    """A method whose result for the same arguments is known, unless the layer replaces a method that it `uses`."""

    def decorate(method: F) -> F:
        @wraps(method)
        def known(self: "Layer", *arguments: Any) -> Any:
            if self.replaced.isdisjoint(uses):
                return self.known.result(lambda: method(self, *arguments), method, *self.made_of, *arguments)
            return method(self, *arguments)

        return cast(F, known)

    return decorate


ARITHMETIC = tuple(name for name in vars(NumpyArithmetic) if not name.startswith("_"))
STEPS = (*ARITHMETIC, "compute", "norm", "norm_weight", "rotate")  # what steps use


class Layer(NumpyArithmetic):
    """A layer whose methods may be replaced. `known`: what was computed for the same call before."""

    replaced: ClassVar[frozenset[str]] = frozenset()  # the methods that are those of subclasses

    def __init_subclass__(cls) -> None:
        cls.replaced |= vars(cls).keys()

    def __init__(self, spec: LayerSpec, weights: Mapping[str, Array], known: Known | None = None) -> None:
        super().__init__(weights)
        self.spec, self.known = spec, known or Known()
        self.made_of: tuple[Any, ...] = (spec, weights)  # and the call
        self.values: Values = {}  # of the call that is computed
        self.sections: Mapping[str, Sequence[Step]] = {}

    @np.errstate(invalid="ignore", over="ignore")  # blocked keys may be NaN or infinite; their scores are replaced by -inf
    def attend(self, call: ReferenceCall) -> Outputs:
        """Every output, with a batch axis."""
        outputs = self._attend(call)
        self.known.is_complete = True
        return outputs

    def _attend(self, call: ReferenceCall) -> Outputs:
        spec = self.spec
        self.made_of = (*self.made_of, call)
        inputs, self.sections = self.known.result(lambda: _begin(spec, call), _begin, spec, call)
        values = self.values = self.weights | inputs
        self.run(self.sections["constants"], values)
        self.run([step for step in self.sections["heads"] if not any(name.endswith("_projection") for name in step.writes)], values)
        heads = self.heads_at("projected", {name: self.project_heads(name, values[name]) for name in CAUSES})
        q, k = self.at_positions(heads["query"], heads["key"])
        heads = self.heads_at("attended", {"query": q, "key": k, "value": heads["value"]})
        q, k, v = heads.values()
        values |= {f"{name}_projection": x for name, x in heads.items()}
        biases = self.position_bias()
        self.run([step for step in self.sections["positioned heads"] if "block_means" in step.writes], values)
        self.run(self.sections["visible"], values)
        self.run([step for step in self.sections["bias"] if step.name != "sum_biases"], values)
        for name in ("forget_bias", "bias"):
            biases = biases if values.get(name) is None else biases + values[name]
        weights = self._weights(q, self.repeat_kv_heads(k, spec.num_heads), biases)
        values["head_outputs"] = self.apply_weights(weights, self.repeat_kv_heads(v, spec.num_heads))
        self.run((*self.sections["head outputs"], *self.sections["output"]), values)
        return named_outputs(spec, values)

    def _weights(self, q: Array, k: Array, biases: Array) -> Array:
        """The attention weights [b, h, q, k], of queries and keys of every head."""
        values, blocked = self.values, ~self.values["visible"]
        all_scores, totals, normalised, mixed = [], [], [], []
        for queries, keys in zip(self.split(q), self.split(k), strict=True):
            values["scores"] = self.masked_scores(queries, keys, biases, values["visible"])
            weights, total = self.weights_of(values["scores"], self.weights["sinks"][:, None] if self.spec.sinks else None)
            if any(step.name == "sigmoid" for step in self.sections["softmax"]):
                weights = self.sigmoid(values["scores"])
            all_scores.append(values["scores"])
            normalised.append(weights)
            mixed.append(self.mixed_weights(weights, blocked))
            totals.append(total)
        values["softmax()"] = np.stack(normalised)
        lists = {"scores": all_scores, "log_sum_exp": totals, "attention_weights": mixed}
        values |= {name: np.stack(x) if len(x) > 1 else x[0] for name, x in lists.items()}  # of several softmaxes, each has its own
        later = [step for step in self.sections["softmax"] if step.name == "fill"]
        self.run((*later, *(step for step in self.sections["weights"] if step.name != "mix_weights")), values)
        return np.asarray(values["attention_weights"])

    def run(self, steps: Sequence[Step], values: Values) -> None:
        """Add what the steps write to the values."""
        for step in steps:
            result = self.compute(step, [values[name] for name in step.reads])
            values |= zip(step.writes, (result,) if len(step.writes) == 1 else result, strict=True)

    def compute(self, step: Step, reads: Sequence[Any]) -> Any:
        """What a step returns; norms and RoPE of heads have methods of their own."""
        verb, _, role = step.name.partition("_")
        if verb == "norm" and role in CAUSES and self.spec.qk_norm is not None:
            return self.norm(reads[0], role, self.spec.qk_norm)
        if verb == "rotate" and role in CAUSES:
            return self.rotate(reads[0], role, reads[1])
        return self._computed(step, *reads)

    def _computed(self, step: Step, *reads: Any) -> Any:
        """What the step computes, which depends on nothing else of the call."""
        if self.replaced.isdisjoint(ARITHMETIC):
            return self.known.result(lambda: step.compute(self, *reads), self.made_of[1], step, *reads)
        return step.compute(self, *reads)

    @reused()
    def repeat_kv_heads(self, x: Array, heads: int = 0) -> Array:
        """For each query head its key or value head: [b, kv heads, n, d] -> [b, h, n, d]."""
        return super().repeat_kv_heads(x, heads or self.spec.num_heads)

    # From inputs to heads: x [b, n, in], heads [b, heads, n, d]

    @reused(*STEPS)
    def project_heads(self, name: str, x: Array) -> Array:
        """A query, key or value as heads, before RoPE: projected and normalised if the layer does that."""
        values = self.values | {name: x}
        self.run(needed(self.sections["heads"], {f"{name}_projection"}), values)
        return np.asarray(values[f"{name}_projection"])

    def heads_at(self, stage: str, heads: Mapping[str, Array]) -> Mapping[str, Array]:
        """The heads of queries, keys and values as they are "projected", before RoPE, and "attended", as scores are computed of them."""
        return heads

    @reused(*ARITHMETIC, "norm_weight")
    def norm(self, x: Array, name: str, norm: QKNorm) -> Array:
        """The norm of heads of queries, keys or values."""
        return np.asarray(normalise(self, x, norm=norm, name="" if name == "value" or norm.weights == "none" else f"{name}_norm"))

    def norm_weight(self, name: str, otherwise: float) -> Array:
        return self.weights[name][..., None, :] if name in self.weights else np.asarray(otherwise)

    @reused(*STEPS)
    def at_positions(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys after RoPE, a norm that comes after it, and the scale of queries by position."""
        values = self.values | {"query_projection": q, "key_projection": k}
        self.run([step for step in self.sections["positioned heads"] if step.name != "distance_vectors"], values)
        return values["query_projection"], values["key_projection"]

    def rotate(self, x: Array, name: str, positions: Array) -> Array:
        """Queries or keys at their positions."""
        for step in self.sections["positioned heads"]:
            if step.name == f"rotate_{name}":
                x = self._computed(step, x, positions, self.values["frequencies"])
        return x

    # Scores and weights: [b, h, q, k]

    def split(self, x: Array) -> list[Array]:
        """The queries or keys of each softmax, from [b, h, n, d]: x alone, unless the layer has several."""
        return np.split(x, self.spec.num_softmaxes, axis=-1) if self.spec.num_softmaxes > 1 else [x]

    @reused(*STEPS)
    def position_bias(self) -> Array:
        """The sum of the biases of the layer, to be broadcast to [b, h, q, k]."""
        self.run(self.sections["biases"], self.values)
        written = [self.values[name] for step in self.sections["biases"] for name in step.writes]
        return np.asarray(sum(written, np.zeros((1, self.spec.num_heads, 1, 1))))

    @reused(*STEPS)
    def raw_scores(self, q: Array, k: Array) -> Array:
        """Q Kᵀ and the terms of the distance, before the scale."""
        scores = q @ k.swapaxes(-1, -2)
        vectors = [step for step in self.sections["positioned heads"] if step.name == "distance_vectors"]
        values = self.values | {"query_projection": q, "key_projection": k, "scores": scores, "scale": 1.0}
        self.run((*vectors, *(step for step in self.sections["raw scores"] if step.name == "add_terms")), values)
        return np.asarray(values["scores"])

    @reused(*STEPS, "raw_scores")
    def mixed_scores(self, q: Array, k: Array) -> Array:
        """Scores after the scale, before biases."""
        values = self.values | {"scores": self.values["scale"] * self.raw_scores(q, k)}
        self.run((*self.sections["capped"], *self.sections["mixed"]), values)
        return np.asarray(values["scores"])

    @reused(*STEPS, "raw_scores", "mixed_scores")
    def masked_scores(self, q: Array, k: Array, biases: Array, visible: Array) -> Array:
        """Scores as the softmax gets them, with biases, and -inf where a key is not visible."""
        values = self.values | {"scores": self.mixed_scores(q, k), "score_bias": biases, "visible": visible}
        self.run(self.sections["scores"], values)
        return np.asarray(values["scores"])

    @reused(*ARITHMETIC)
    def weights_of(self, scores: Array, sinks: Array | None) -> tuple[Array, Array]:
        """The softmax of scores [b, h, q, k] with sinks [h, 1], and log Σ exp of both: [b, h, q]."""
        weights, total = self.softmax_and_log_sum_exp(scores)
        if sinks is None:
            return weights, total
        return weights * self.sigmoid(total - sinks)[..., None], np.asarray(sum_with_sinks(self, total, sinks[:, 0]))

    def mixed_weights(self, weights: Array, blocked: Array) -> Array:
        """Weights before fully masked rows are filled."""
        values = self.values | {"attention_weights": weights, "visible": ~blocked}
        self.run([step for step in self.sections["weights"] if step.name == "mix_weights"], values)
        return np.asarray(values["attention_weights"])

    @reused(*ARITHMETIC)
    def apply_weights(self, weights: Array, values: Array) -> Array:
        """Σ_j w_ij v_j: [b, h, q, k], [b, h, k, d] -> [b, h, q, d]."""
        return self.weighted_values(weights, values)


def _begin(spec: LayerSpec, call: ReferenceCall) -> tuple[Values, Mapping[str, Sequence[Step]]]:
    """What the program gets of a call, and its sections."""
    return inputs_of(spec, call), sections_of(spec, features_of(spec, call) | {"joined_keys", "values"})
