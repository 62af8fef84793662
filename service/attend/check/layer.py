"""The reference with places to change it: `check/changes.py` replaces methods of this layer in subclasses, to make mistakes.

It runs the steps of the layer's program, section by section. The methods stand for what people write wrongly: they have the arithmetic of
the steps, unless a subclass replaces them. Keys that share their rotary part (`latent`) are joined before RoPE, as most implementations do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from attend.attention.dataflow import needed
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


@dataclass(frozen=True, slots=True)
class ComparedOutputs:
    """The outputs that a candidate is compared with, and what their tolerances depend on."""

    output: Array  # [b, q, output_dim]
    attention_weights: Array  # [b, h, q, k]
    scores: Array  # [b, h, q, k], before the softmax, -inf where a key is blocked; of n softmaxes [b, n * h, q, k]
    fully_masked: Array  # [b, h, q], true where no key is left


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
    used = frozenset(uses)

    def decorate(method: F) -> F:
        @wraps(method)
        def known(self: "Layer", *arguments: Any) -> Any:
            if self.replaced.isdisjoint(used):
                return self.known.result(lambda: method(self, *arguments), method, *self.made_of, *arguments)
            return method(self, *arguments)

        return cast(F, known)

    return decorate


ARITHMETIC = frozenset(name for name in vars(NumpyArithmetic) if not name.startswith("_"))
STEPS = ARITHMETIC | {"compute"}  # what steps use


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
        self.steps: Mapping[str, Sequence[Step]] = {}

    def attend(self, call: ReferenceCall) -> Outputs:
        """Every output, with a batch axis."""
        self.compared(call)
        return named_outputs(self.spec, self.values | {"softmax()": np.stack(self.values["softmax()"])})

    @np.errstate(invalid="ignore", over="ignore")  # blocked keys may be NaN or infinite; their scores are replaced by -inf
    def compared(self, call: ReferenceCall) -> ComparedOutputs:
        """The outputs that a candidate is compared with, of a call with a batch axis."""
        outputs = self._compared(call)
        self.known.is_complete = True
        return outputs

    def _compared(self, call: ReferenceCall) -> ComparedOutputs:
        spec = self.spec
        self.made_of = (*self.made_of, call)
        inputs, self.steps = self.known.result(lambda: _begin(spec, call), _begin, spec, call)
        values = self.values = self.weights | inputs
        self.run(self.steps["constants"], values)
        self.run(self.steps["before heads"], values)
        heads = self.heads_at("projected", {name: self.project_heads(name, values[name]) for name in CAUSES})
        q, k = self.at_positions(heads["query"], heads["key"])
        heads = self.heads_at("attended", {"query": q, "key": k, "value": heads["value"]})
        q, k, v = heads.values()
        values |= {f"{name}_projection": x for name, x in heads.items()}
        biases = self.position_bias()
        self.run(self.steps["before biases"], values)
        for name in ("forget_bias", "bias"):
            biases = biases if values.get(name) is None else biases + values[name]
        weights = self._weights(q, self.repeat_kv_heads(k, spec.num_heads), biases)
        values["head_outputs"] = self.apply_weights(weights, self.repeat_kv_heads(v, spec.num_heads))
        self.run(self.steps["output"], values)
        scores = values["scores"]
        scores = scores if scores.ndim == 4 else np.moveaxis(scores, 0, 1).reshape(len(call.query), -1, *scores.shape[-2:])
        return ComparedOutputs(values["output"], values["attention_weights"], scores, values["fully_masked"])

    def _weights(self, q: Array, k: Array, biases: Array) -> Array:
        """The attention weights [b, h, q, k], of queries and keys of every head."""
        values, blocked = self.values, ~self.values["visible"]
        all_scores, totals, normalised, mixed = [], [], [], []
        for queries, keys in zip(self.split(q), self.split(k), strict=True):
            values["scores"] = self.masked_scores(queries, keys, biases, values["visible"])
            weights, total = self.weights_of(values["scores"], self.weights["sinks"][:, None] if self.spec.sinks else None)
            if self.steps["sigmoid"]:
                weights = self.sigmoid(values["scores"])
            all_scores.append(values["scores"])
            normalised.append(weights)
            mixed.append(self.mixed_weights(weights, blocked))
            totals.append(total)
        values["softmax()"] = normalised
        lists = {"scores": all_scores, "log_sum_exp": totals, "attention_weights": mixed}
        values |= {name: np.stack(x) if len(x) > 1 else x[0] for name, x in lists.items()}  # of several softmaxes, each has its own
        self.run(self.steps["after weights"], values)
        return np.asarray(values["attention_weights"])

    def run(self, steps: Sequence[Step], values: Values) -> None:
        """Add what the steps write to the values."""
        for step in steps:
            result = self.compute(step, [values[name] for name in step.reads])
            values |= zip(step.writes, (result,) if len(step.writes) == 1 else result, strict=True)

    def compute(self, step: Step, reads: Sequence[Any]) -> Any:
        """What a step returns, which depends on nothing else of the call."""
        if self.replaced.isdisjoint(ARITHMETIC):
            return self.known.result(lambda: step.compute(self, *reads), self.made_of[1], step, *reads)
        return step.compute(self, *reads)

    def again(self, name: str, x: Array) -> Array:
        """What the step of this name makes of x, in place of the first value that it reads."""
        step = next(step for steps in self.steps.values() for step in steps if step.name == name)
        return np.asarray(self.compute(step, [x, *(self.values[name] for name in step.reads[1:])]))

    @reused()
    def repeat_kv_heads(self, x: Array, heads: int = 0) -> Array:
        """For each query head its key or value head: [b, kv heads, n, d] -> [b, h, n, d]."""
        return super().repeat_kv_heads(x, heads or self.spec.num_heads)

    # From inputs to heads: x [b, n, in], heads [b, heads, n, d]

    @reused(*STEPS)
    def project_heads(self, name: str, x: Array) -> Array:
        """A query, key or value as heads, before RoPE: projected and normalised if the layer does that."""
        values = self.values | {name: x}
        self.run(self.steps[name], values)
        return np.asarray(values[f"{name}_projection"])

    def heads_at(self, stage: str, heads: Mapping[str, Array]) -> Mapping[str, Array]:
        """The heads of queries, keys and values as they are "projected", before RoPE, and "attended", as scores are computed of them."""
        return heads

    @reused(*STEPS)
    def at_positions(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys after RoPE, a norm that comes after it, and the scale of queries by position."""
        values = self.values | {"query_projection": q, "key_projection": k}
        self.run(self.steps["positioned heads"], values)
        return values["query_projection"], values["key_projection"]

    # Scores and weights: [b, h, q, k]

    def split(self, x: Array) -> list[Array]:
        """The queries or keys of each softmax, from [b, h, n, d]: x alone, unless the layer has several."""
        return np.split(x, self.spec.num_softmaxes, axis=-1) if self.spec.num_softmaxes > 1 else [x]

    @reused(*STEPS)
    def position_bias(self) -> Array:
        """The sum of the biases of the layer, to be broadcast to [b, h, q, k]."""
        self.run(self.steps["biases"], self.values)
        written = [self.values[name] for step in self.steps["biases"] for name in step.writes]
        return np.asarray(sum(written, np.zeros((1, self.spec.num_heads, 1, 1))))

    @reused(*STEPS)
    def raw_scores(self, q: Array, k: Array) -> Array:
        """Q Kᵀ and the terms of the distance, before the scale."""
        scores = q @ k.swapaxes(-1, -2)
        values = self.values | {"query_projection": q, "key_projection": k, "scores": scores, "scale": 1.0}
        self.run(self.steps["terms"], values)
        return np.asarray(values["scores"])

    @reused(*STEPS, "raw_scores")
    def masked_scores(self, q: Array, k: Array, biases: Array, visible: Array) -> Array:
        """Scores as the softmax gets them, with biases, and -inf where a key is not visible."""
        values = self.values | {"scores": self.values["scale"] * self.raw_scores(q, k), "score_bias": biases, "visible": visible}
        self.run(self.steps["scores"], values)
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
        self.run(self.steps["mix_weights"], values)
        return np.asarray(values["attention_weights"])

    @reused(*ARITHMETIC)
    def apply_weights(self, weights: Array, values: Array) -> Array:
        """Σ_j w_ij v_j: [b, h, q, k], [b, h, k, d] -> [b, h, q, d]."""
        return self.weighted_values(weights, values)


def _begin(spec: LayerSpec, call: ReferenceCall) -> tuple[Values, Mapping[str, Sequence[Step]]]:
    """What the program gets of a call, and its steps as methods run them."""
    return inputs_of(spec, call), _steps_of(spec, frozenset(features_of(spec, call)))


@lru_cache(1024)
def _steps_of(spec: LayerSpec, features: frozenset[str]) -> Mapping[str, Sequence[Step]]:
    """The steps of the program by what they are run for."""
    sections = sections_of(spec, features | {"joined_keys", "values"})

    def steps(section: str, *names: str) -> list[Step]:
        return [step for step in sections[section] if step.name in names]

    def without(section: str, *names: str) -> list[Step]:
        return [step for step in sections[section] if step.name not in names]

    return {
        **{cause: needed(sections["heads"], {f"{cause}_projection"}) for cause in CAUSES},
        "constants": sections["constants"],
        "before heads": [step for step in sections["heads"] if not any(name.endswith("_projection") for name in step.writes)],
        "positioned heads": without("positioned heads", "distance_vectors"),
        "biases": sections["biases"],
        "before biases": [
            *(step for step in sections["positioned heads"] if "block_means" in step.writes),
            *(*sections["visible"], *without("bias", "sum_biases")),
        ],
        "terms": [*steps("positioned heads", "distance_vectors"), *steps("raw scores", "add_terms")],
        "scores": [*sections["capped"], *sections["mixed"], *sections["scores"]],
        "sigmoid": steps("softmax", "sigmoid"),
        "mix_weights": steps("weights", "mix_weights"),
        "after weights": [*steps("softmax", "fill"), *without("weights", "mix_weights")],
        "output": [*sections["head outputs"], *sections["output"]],
    }
