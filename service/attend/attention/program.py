"""`program_of`: a layer as an ordered tuple of named steps. Everything that computes, describes or cuts a layer reads this tuple.

    Attention(Q, K, V) = softmax(mask(cap(scale · Q Kᵀ) + bias)) V        (Vaswani et al. 2017, equation 1; masks and cap as in ONNX)

`executor.py` runs a program with torch, `reference/` runs the same one whole in NumPy float64. The steps of operators are in their files
(`operators/`); those that every layer has are here. What follows from what the steps read and write is in `dataflow.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attend.attention.operators.projection import product_formula, project_heads
from attend.attention.operators.step import HEAD_OUTPUTS, PAIRS, SCORES, VISIBLE, WEIGHTS, Step, Steps, Value
from attend.axes import PROGRAM_TENSORS

if TYPE_CHECKING:
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions

Program = tuple[Step, ...]

# The axes of what a program gets: the tensors of a call, and what depends on its masks.
INPUT_AXES: Mapping[str, str] = {
    "query": "b,q,query_dim",
    "key": "b,k,key_dim",
    "value": "b,k,value_dim",
    "positions": "b,q",  # of queries among the keys
    "keys": "k",  # 0, 1, …
    "query_coordinates": "b,q,axes",  # by which RoPE rotates; without the last axis if there is one coordinate
    "key_coordinates": "b,k,axes",
    "masks": PAIRS,  # what visibility follows from
    "fully_masked": "b,h,q",
    "bias": PAIRS,  # of the call
    "kept": PAIRS,  # by dropout
    **{field.value: field.axes for name, field in PROGRAM_TENSORS.items()},  # of the call
    **dict.fromkeys(("scale", "softcap", "kept_share"), ""),  # numbers
}

OPTIONAL = frozenset({"bias", "values"})  # features by which calls have more values


def program_of(spec: Dimensions, features: Collection[str] = ()) -> Program:
    """The steps of a layer for calls with these features (`Call.features`), in the order in which they run."""
    return tuple(step for steps in sections_of(spec, features).values() for step in steps)


def sections_of(spec: Dimensions, features: Collection[str] = ()) -> Mapping[str, Program]:
    """The program in sections, by name.

    `part`: the call is one of several with some of the keys each, so the program ends with the weighted values, without sinks.
    """
    return _sections_of(spec, frozenset(features))


@lru_cache(1024)  # `attend check` computes thousands of calls of the same layers
def _sections_of(spec: Dimensions, features: frozenset[str]) -> Mapping[str, Program]:
    at = _operator_steps(spec, features)
    masked = visibility(spec, features)
    restricted = masked or [step for step in at["select"] if "visible" in step.writes]
    biases = [name for step in (*at["bias"], *at["visible_bias"]) for name in step.writes] + ["bias"] * ("bias" in features)
    fill = (FILL,) if "uniform" in features else ()
    sections: dict[str, Program] = {
        "constants": at["constants"],
        "heads": (*(at["project"] or project_heads(spec)), *at["norm"]),
        "positioned heads": (*at["rotate"], *at["expand"], *at["rescale"]),
        "biases": at["bias"],
        "visible": (*(masked or (ALL_VISIBLE,)), *at["select"], *((EMPTY_ROWS,) if any(step.empties for step in at["select"]) else ())),
        "bias": (*at["visible_bias"], *((_sum_of(biases),) if biases else ())),
        "raw scores": (*(at["scores"] or (SCALED_PRODUCTS,)), *at["terms"]),
        "capped": at["cap"],
        "mixed": at["mix_scores"],
        "scores": (*((ADD_BIAS,) if biases else ()), *at["scale_scores"], *((MASK,) if restricted else ())),
        "softmax": (*(at["normalise"] or (SOFTMAX, LOG_SUM_EXP)), *(() if "part" in features else at["sinks"]), *fill),
        "weights": (
            *at["combine"],
            *at["mix_weights"],
            *(fill if at["mix_weights"] else ()),
            *((REPLACE_WEIGHTS,) if "pattern" in features else ()),
            *((DROPOUT,) if "dropout" in features else ()),
        ),
        "weighted values": (WEIGHTED_VALUES,),
    }
    if spec.num_softmaxes > 1:
        sections |= {name: tuple(_of_softmaxes(step, spec.num_softmaxes) for step in sections[name]) for name in OF_EACH_SOFTMAX}
    if "part" in features:
        return sections
    return sections | {
        "head outputs": (
            *at["value_norm"],
            *((SCALE_HEADS,) if "head_scale" in features else ()),
            *at["gate"],
            *((REPLACE_HEADS,) if "other_heads" in features else ()),
        ),
        "output": (MERGE, _output(spec)),
    }


OF_EACH_SOFTMAX = ("raw scores", "capped", "mixed", "scores", "softmax")


def _of_softmaxes(step: Step, count: int) -> Step:
    """The step for several softmaxes of each head, whose scores and weights are side by side on a first axis."""
    return step._replace(writes={name: value._replace(axes=f"{count},{value.axes}") for name, value in step.writes.items()})


def _operator_steps(spec: Dimensions, features: Collection[str]) -> dict[str, tuple[Step, ...]]:
    """The steps of the layer's operators, by their place in `program_of`."""
    at: dict[str, tuple[Step, ...]] = dict.fromkeys(PLACES, ())
    for operator in spec.all_operators:
        steps: Steps = operator.steps(spec, features) if not operator.of_calls or operator.field in features else {}
        for place, more in steps.items():
            at[place] += more
    return at


# Where operators have steps: those at a place of SINGLE replace the ones there.
PLACES = (
    *("constants", "project", "norm", "rotate", "expand", "rescale", "bias", "select", "visible_bias", "scores", "terms", "cap"),
    *("mix_scores", "scale_scores", "normalise", "sinks", "combine", "mix_weights", "value_norm", "gate"),
)
SINGLE = frozenset({"project", "scores", "normalise", "sinks", "combine"})


def _visible(m: Arithmetic, masks: Any) -> Any:
    return masks.visible()


def _all_visible(m: Arithmetic, keys: Any) -> Any:
    return (keys >= 0)[None, None, None]


# Whether query i may attend to key j, by what restricts it: kernels compute some of these without a mask of each pair.
RESTRICTIONS: Mapping[str, str] = {
    "causal": "j is visible to i if j ≤ i",
    "intervals": "j is visible to i if first_i ≤ j ≤ last_i",
    "sets": "j is visible to i if all masks allow it",
}


def visibility(spec: Dimensions, features: Collection[str]) -> Program:
    """The step that says which keys are visible to each query; none if all are."""
    for restriction in ("sets", "intervals", "causal"):
        if restriction in features:
            intervals = [str(operator.interval(spec)) for operator in spec.operators] + ["j ≤ i"] * ("causal" in features)
            formula = f"j is visible to i if {' and '.join(filter(None, intervals))}" if any(intervals) else RESTRICTIONS[restriction]
            return (Step(f"visible_{restriction}", ("masks",), VISIBLE, formula, _visible),)
    return ()


ALL_VISIBLE = Step("all_visible", ("keys",), VISIBLE, "every j is visible to i", _all_visible)


EMPTY_ROWS = Step(
    "empty_rows",
    ("visible",),
    {"fully_masked": Value("b,h,q", "bool")},
    "rows in which no key is visible are fully masked",
    lambda m, visible: ~visible.any(axis=-1),
)


def _sum_of(biases: Sequence[str]) -> Step:
    """What is added to the scores."""

    def add(m: Arithmetic, *terms: Any) -> Any:
        total = terms[0] if len(terms) == 1 else m.wide(terms[0])  # the sum of two biases in half precision would be rounded
        for term in terms[1:]:
            total = total + m.wide(term)
        return total

    return Step("sum_biases", tuple(biases), {"score_bias": Value(PAIRS)}, f"B = {' + '.join(biases)}", add)


SCALED_PRODUCTS = Step(
    "scaled_products",
    ("query_projection", "key_projection", "scale"),
    SCORES,
    "S = scale · Q Kᵀ",
    lambda m, query, key, scale: m.scores(query, key, scale),
    products=("b,h,q,k,head_dim",),
)
ADD_BIAS = Step("add_bias", ("scores", "score_bias"), SCORES, "S = S + B", lambda m, scores, bias: scores + bias)
MASK = Step(
    "mask",
    ("scores", "visible"),
    SCORES,
    "S_ij = -∞ where j is not visible to i",
    lambda m, scores, visible: m.mask(scores, visible),
)
SOFTMAX = Step(
    "softmax",
    ("scores", "fully_masked"),
    WEIGHTS,
    "A_ij = exp(S_ij) / Σ_j exp(S_ij), 0 in rows without a visible key",
    lambda m, scores, fully_masked: m.softmax(scores, fully_masked),
)
LOG_SUM_EXP = Step(
    "sum_exponentials", ("scores",), {"log_sum_exp": Value("b,h,q")}, "L_i = ln Σ_j exp(S_ij)", lambda m, scores: m.log_sum_exp(scores)
)


def _fill(m: Arithmetic, weights: Any, fully_masked: Any) -> Any:
    return weights if fully_masked is None else m.where(~fully_masked[..., None], weights, 1 / max(1, weights.shape[-1]))


def _replace(m: Arithmetic, computed: Any, other: Any, rows: Any) -> Any:
    other = m.xp.broadcast_to(m.like(other, computed), computed.shape)
    return other if rows is None else m.xp.where(rows, other, computed)


FILL = Step("fill", ("attention_weights", "fully_masked"), WEIGHTS, "A_ij = 1/k in rows without a visible key", _fill)
REPLACE_WEIGHTS = Step("replace_weights", ("attention_weights", "pattern", "pattern_rows"), WEIGHTS, "A = pattern", _replace)
DROPOUT = Step(
    "dropout",
    ("attention_weights", "kept", "kept_share"),
    WEIGHTS,
    "A = A · kept / (1 - p)",
    lambda m, weights, kept, share: weights * kept / share,
)
WEIGHTED_VALUES = Step(
    "weighted_values",
    ("attention_weights", "value_projection"),
    HEAD_OUTPUTS,
    "O = A V",
    lambda m, weights, value: m.weighted_values(weights, value),
    products=("b,h,q,value_head_dim,k",),
)
SCALE_HEADS = Step(
    "scale_heads", ("head_outputs", "head_scale"), HEAD_OUTPUTS, "O_h = head_scale_h · O_h", lambda m, heads, scale: heads * scale
)
REPLACE_HEADS = Step("replace_heads", ("head_outputs", "other_heads", "other_head_rows"), HEAD_OUTPUTS, "O = head_outputs", _replace)
MERGE = Step(
    "merge",
    ("head_outputs",),
    {"concatenated": Value("b,q,h * value_head_dim")},
    "C = concat(O_1, …, O_h)",
    lambda m, heads: m.merge_heads(heads),
)


def _output(spec: Dimensions) -> Step:
    writes = {"output": Value("b,q,output_dim")}
    if not spec.projections:
        return Step("output", ("concatenated",), writes, "Y = C", lambda m, concatenated: concatenated)
    formula, products = f"Y = {product_formula(spec, 'output', 'C')}", ("b,q,output_dim,h * value_head_dim",)
    return Step("output", ("concatenated",), writes, formula, lambda m, concatenated: m.project(concatenated, "output"), products=products)


@lru_cache(1024)
def outputs_of(spec: Dimensions, features: frozenset[str]) -> Mapping[str, Value]:
    """What calls with these features may ask for: every value that a step writes, but those of a length that numbers of the call decide."""
    written = {name: value for step in program_of(spec, features) for name, value in step.writes.items()}
    return {name: value for name, value in written.items() if "?" not in value.axes}


def formulas(program: Sequence[Step]) -> dict[str, str]:
    """Step -> its formula, in order; x are the inputs of queries, z those of keys and values."""
    return {step.name: step.formula for step in program if step.formula}
