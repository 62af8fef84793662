"""A step left out, done twice, after the next one, with the opposite sign, at other positions, or over another axis."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attend.attention.operators.step import Step
from attend.check.changes import all_of, at_heads, at_step, at_steps, exchange_steps, only_if, softmax_over
from attend.check.layer import Layer
from attend.check.mistakes.mistake import Mistake, Named
from attend.tensors import Array

NOUNS = {"query": "queries", "key": "keys", "value": "values"}
VERBS = {"norm": "the norm", "rotate": "RoPE"}
WORDS = {
    "scale_query": "the factor on queries by their position",
    "mix_scores": "the mixing of scores over heads",
    "mix_weights": "the mixing of weights over heads",
    "scale_by_count": "the scale by the number of keys",
    "apply_gate": "the gate",
    "norm_heads": "the norm of the outputs of heads",
}
SIGNED = {"scaled_products": "the scores have", "output": "the output has"}
NOT_RUN = ("sum_biases", "sinks")  # of which the reference with places to change it makes no steps


def changed_steps(program: Sequence[Step]) -> Iterator[Named]:
    """The changes of each step of a program."""
    for i, step in enumerate(program):
        if step.name not in NOT_RUN:
            if next(iter(step.writes)) in step.reads[:1]:
                yield from _of_structure(step, [x for x in program[i + 1 :] if x.name not in NOT_RUN])
            yield from _of_sign(step)
            if step.name in ("norm_key", "rotate_key"):
                yield _of_values(step)
            if step.name.startswith("rotate_"):
                yield from _of_turns(step.name.partition("_")[2])
            yield from _of_places(step)
            if step.name == "softmax":
                yield from _of_softmax()


def _left_out(compute: Any, x: Any, *others: Any) -> Any:
    return x


def _twice(compute: Any, x: Any, *others: Any) -> Any:
    return compute(compute(x, *others), *others)


def _roles(step: Step) -> Sequence[tuple[str, ...]]:
    """Whose steps of this verb may be wrong alone or together: those of one role, and of queries and keys. "": the step has no role."""
    role = step.name.partition("_")[2]
    return [(role,), ("query", "key")] if role == "query" else [(role if role in NOUNS else "",)]


def _the(step: Step, roles: Sequence[str]) -> str:
    """A step in words: the norm of the queries, RoPE of queries and keys, the softcap."""
    verb = step.name.partition("_")[0]
    if verb in VERBS and roles[0]:
        return f"{VERBS[verb]} of {'the ' if len(roles) == 1 else ''}{' and '.join(NOUNS[x] for x in roles)}"
    return WORDS.get(step.name, f"the {step.name.replace('_', ' ')}")


def _is_bias(step: Step) -> bool:
    return next(iter(step.writes)).endswith("_bias")


def _biases(step: Step) -> str:
    return "ALiBi's biases" if step.name == "alibi" else f"the biases of {step.name.replace('_bias', '')}"


def _of_structure(step: Step, later: Sequence[Step]) -> Iterator[Named]:
    """The step left out, done twice, or done after the next one that changes the same value."""
    formula = step.formula.partition(",")[0]
    following = next((x for x in later if {*step.writes} <= {*x.writes} & {*x.reads}), None)
    there = {x.name for x in (step, *later)}
    for roles in _roles(step):
        steps, words = [step.name.replace(roles[0], role) for role in roles], _the(step, roles)
        if not {*steps} <= there:
            continue
        if len(roles) == 1 and step.name.partition("_")[0] in VERBS:  # all of them: `mistakes/parts.py`
            yield f"{words} is left out", Mistake(at_steps(steps, _left_out), f"without {formula}", formula, step.name)
        yield f"{words} is applied twice", Mistake(at_steps(steps, _twice), f"twice {formula}", formula, step.name)
        pairs = [] if following is None else [(x, following.name.replace(roles[0], role)) for x, role in zip(steps, roles, strict=True)]
        if following is not None and {name for _, name in pairs} <= there:
            then, other = following.formula.partition(",")[0], VERBS.get(following.name.partition("_")[0], _the(following, ("",)))
            change = all_of(*(exchange_steps(*pair) for pair in pairs))
            mistake = Mistake(change, f"{then}; {formula}", f"{formula}; {then}", step.name)
            yield f"{words} is applied after {other} and not before", mistake


def _of_sign(step: Step) -> Iterator[Named]:
    """What the step computes with the opposite sign."""
    if step.name in SIGNED or _is_bias(step):
        change = at_step(step.name, lambda compute, *operands: -compute(*operands))
        words = SIGNED.get(step.name, f"{_biases(step)} have")
        left, _, right = step.formula.partition(" = ")
        yield f"{words} the opposite sign", Mistake(change, f"{left} = -({right})", step.formula, step.name)


def _of_values(step: Step) -> Named:
    """What is done to the keys done to the values, too."""

    def changed(layer: Layer, heads: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"value": layer.again(step.name, heads["value"])}

    formula, change = step.formula.partition(",")[0], only_if(lambda c: c.spec.num_softmaxes == 1, at_heads("attended", changed))
    return f"{_the(step, ('key',))} is applied to the values, too", Mistake(change, f"{formula}, and V likewise", formula, step.name)


def _of_turns(role: str) -> Iterator[Named]:
    """RoPE of the queries, of the keys, or of both, with angles of the opposite sign."""
    for roles in [(role,), ("query", "key")] if role == "query" else [(role,)]:
        change = at_steps([f"rotate_{x}" for x in roles], lambda compute, x, positions, *others: compute(x, -positions, *others))
        queries, keys = (f"-{i}" if x in roles else i for x, i in (("query", "i"), ("key", "j")))
        name = f"RoPE of {' and '.join(NOUNS[x] for x in roles)} turns the other way: its sines have the opposite sign"
        yield name, Mistake(change, f"R({queries}) q_i · R({keys}) k_j", "R(i) q_i · R(j) k_j", f"rotate_{role}")


def _of_places(step: Step) -> Iterator[Named]:
    """The places of the keys off by one; one too high of the query is one too low of the key."""
    is_bias = _is_bias(step) and "keys" in step.reads
    if step.name != "rotate_key" and not is_bias:
        return
    of_keys = step.reads.index("keys" if is_bias else "key_coordinates")
    for high, after, sign, by in (("high", "after", "+", 1), ("low", "before", "-", -1)):
        change = at_step(step.name, lambda compute, *x, by=by: compute(*x[:of_keys], x[of_keys] + by, *x[of_keys + 1 :]))
        off = (
            f"{_biases(step)} are off by one: each is that of the key {after}"
            if is_bias
            else f"RoPE's positions of the keys are one too {high}"
        )
        yield off, Mistake(change, re.sub(r"\(j\)|\bj\b", f"(j {sign} 1)", step.formula), step.formula, step.name)


def _of_softmax() -> Iterator[Named]:
    """The softmax taken twice, or over other axes than that of the keys."""
    twice = at_step("softmax", lambda compute, scores, sinks: compute(compute(scores, sinks)[0], sinks))
    yield "the softmax is taken twice", Mistake(twice, "A = softmax(softmax(S))", "A = softmax(S)", "softmax")
    formula = "P = exp(S - m) / Σ exp(S - m), m and Σ over the "
    for axis, words in enumerate(("batch", "heads", "queries")):
        for axes, over in (((axis,), f"the {words} and not over the keys"), ((axis, -1), f"{words} and keys together")):
            wrong = f"{formula}{words}{' and keys' if len(axes) > 1 else ''}"
            yield f"the softmax runs over {over}", Mistake(softmax_over(axes), wrong, f"{formula}keys", "softmax")
