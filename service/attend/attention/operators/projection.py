"""Projections into heads, which every layer has, and latent attention in its own way: their arithmetic and their formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attend.attention.operators.step import Step, Value

if TYPE_CHECKING:
    from attend.attention.operators.step import Arithmetic
    from attend.spec_parts import Dimensions

HEADS = {
    "query": Value("b,h,q,head_dim"),
    "key": Value("b,kv heads,k,head_dim"),
    "value": Value("b,kv heads,k,value_head_dim"),
}


def written_heads(role: str) -> dict[str, Value]:
    """What a step writes that computes or changes the heads of queries, keys or values."""
    return {f"{role}_projection": HEADS[role]}


def num_heads(spec: Dimensions, role: str) -> int:
    return spec.num_heads if role == "query" else spec.num_kv_heads


def product_formula(spec: Dimensions, role: str, x: str, weight: str = "") -> str:
    """The formula of a projection of x, such as `x W_Q + b_Q`."""
    letter = role[0].upper()
    return f"{x} W_{weight or letter}" + (f" + b_{weight or letter}" if spec.has_bias(role) else "")


def split(m: Arithmetic, x: Any, *, name: str, heads: int) -> Any:
    """x W + b with the projection of this name, x itself without a name, cut into heads: [b, n, in] -> [b, heads, n, d]."""
    return m.split_heads(m.project(x, name) if name else x, heads)


def project_heads(spec: Dimensions) -> tuple[Step, ...]:
    """The steps that project query, key and value into heads."""
    steps = []
    for role, x in (("query", "x"), ("key", "z"), ("value", "z")):
        heads, name = num_heads(spec, role), role if spec.projections else ""
        formula = f"{role[0].upper()} = split({product_formula(spec, role, x) if name else role}, {heads} heads)"

        def compute(m: Arithmetic, rows: Any, name: str = name, heads: int = heads) -> Any:
            return split(m, rows, name=name, heads=heads)

        products = (f"{HEADS[role].axes},{role}_dim",) if name else ()
        steps.append(Step(f"project_{role}", (role,), written_heads(role), formula, compute, products=products))
    return tuple(steps)
