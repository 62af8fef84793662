"""Single mistakes planted in Python source: each is one change of its syntax tree, as people make it."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SWAPPED_OPERATORS = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
}
SWAPPED_COMPARISONS = {
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
SWAPPED_NAMES = {  # of functions, methods and attributes
    "tril": ("triu",),
    "triu": ("tril",),
    "cos": ("sin",),
    "sin": ("cos",),
    "ones": ("zeros",),
    "zeros": ("ones",),
    "max": ("min", "mean"),
    "repeat_interleave": ("repeat",),
    "rsqrt": ("reciprocal",),
    "sqrt": ("exp",),
    "num_kv_heads": ("num_heads",),
    "float": ("bfloat16",),
}
DROPPED_CALLS = {  # f(x) or x.f(…) becomes x
    *("sqrt", "exp", "softmax", "transpose", "tril", "triu", "float", "to", "repeat_interleave", "pow", "rsqrt", "rotate", "q_norm"),
    *(
        "k_norm",
        "cos",
        "sin",
        "swapaxes",
        "masked_fill",
        "where",
        "W_o",
        "out_proj",
        "o_proj",
        "c_proj",
        "mean",
        "rotate_half",
        "contiguous",
    ),
}
ROLES = ("q", "k", "v", "query", "key", "value", "Q", "K", "V")
HEADS_AND_ROWS = (("num_queries", "num_keys"), ("b", "h"), ("i", "j"), ("batch", "length"))


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted mistake: what was changed, and the whole source with it."""

    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.before} -> {self.after}"


def mutations(source: str) -> Iterator[Mutation]:
    """Every single mistake that the rules below plant in the source, without repetition."""
    tree, seen = ast.parse(source), {ast.unparse(ast.parse(source))}
    nodes = list(ast.walk(tree))
    for index, node in enumerate(nodes):
        for change in _changes(node):
            mutant = copy.deepcopy(tree)
            target = list(ast.walk(mutant))[index]
            before = ast.unparse(target)
            replacement = change(target)
            if replacement is not target:
                _replace(mutant, target, replacement)
            ast.fix_missing_locations(mutant)
            text = ast.unparse(mutant)
            if text in seen:
                continue
            seen.add(text)
            after = "nothing" if isinstance(replacement, ast.Pass) else ast.unparse(replacement)
            yield Mutation(getattr(node, "lineno", 0), _short(before), _short(after), text)


def _short(text: str) -> str:
    first = text.splitlines()[0]
    return first if len(first) <= 70 else first[:67] + "..."


def _replace(tree: ast.AST, target: ast.AST, replacement: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, replacement)
                return
            if isinstance(value, list):
                for i, item in enumerate(value):
                    if item is target:
                        value[i] = replacement
                        return


def _changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    for rule in RULES:
        yield from rule(node)


def _operators(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    if isinstance(node, ast.BinOp):
        for other in SWAPPED_OPERATORS.get(type(node.op), ()):
            yield lambda n, other=other: _with(n, op=other())
        if isinstance(node.op, ast.Mult | ast.Div | ast.Pow | ast.Add | ast.Sub):
            yield lambda n: n.left
        if isinstance(node.op, ast.Sub | ast.MatMult | ast.Div):
            yield lambda n: _with(n, left=n.right, right=n.left)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in SWAPPED_COMPARISONS.get(type(node.ops[0]), ()):
            yield lambda n, other=other: _with(n, ops=[other()])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
        yield lambda n: n.operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield lambda n: n.operand


def _constants(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = -node.operand.value
        others = [value - 1, value + 1] if isinstance(value, int) else [0.0, -value, value / 2, value * 2]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        others = [node.value + 1, node.value - 1]
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        others = [node.value * 2, node.value / 10, 0.0]
    else:
        return
    for other in others:
        yield lambda n, other=other: ast.Constant(other)


def _names(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    if isinstance(node, ast.Attribute):
        for other in SWAPPED_NAMES.get(node.attr, ()):
            yield lambda n, other=other: _with(n, attr=other)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        same_case = [r for r in ROLES if len(r) == len(node.id) == 1 or len(r) > 1 < len(node.id)]
        for other in same_case if node.id in ROLES else ():
            if other != node.id and other.isupper() == node.id.isupper():
                yield lambda n, other=other: ast.Name(other, ast.Load())
        for pair in HEADS_AND_ROWS:
            if node.id in pair:
                yield lambda n, pair=pair: ast.Name(pair[1 - pair.index(n.id)], ast.Load())


def _calls(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    if name in DROPPED_CALLS:
        module = (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("np", "torch", "F", "math")
        )
        own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
        if (module or own or isinstance(node.func, ast.Name)) and node.args:
            yield lambda n: n.args[1] if name == "where" and len(n.args) == 3 else n.args[0]
        elif isinstance(node.func, ast.Attribute):
            yield lambda n: n.func.value
    if name in ("transpose", "permute", "swapaxes", "view", "reshape", "matmul", "masked_fill", "where") and len(node.args) >= 2:
        yield lambda n: _with(n, args=[*n.args[:-2], n.args[-1], n.args[-2]])
    if name in ("cat", "concatenate", "stack") and node.args and isinstance(node.args[0], ast.Tuple | ast.List):
        yield lambda n: _with(n, args=[_with(n.args[0], elts=n.args[0].elts[::-1]), *n.args[1:]])
    if name == "einsum" and isinstance(node.args[0], ast.Constant):
        inputs, _, output = node.args[0].value.partition("->")
        first, second = inputs.split(",")
        for changed in (
            f"{first},{second[:-2]}{second[-1]}{second[-2]}->{output}",
            f"{first},{second}->{output[0]}{output[2]}{output[1]}{output[3:]}",
        ):
            yield lambda n, changed=changed: _with(n, args=[ast.Constant(changed), *n.args[1:]])


def _statements(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = ast.unparse(node.targets[0])
        if any(ast.unparse(n) == target for n in ast.walk(node.value) if isinstance(n, ast.Name | ast.Attribute | ast.Subscript)):
            yield lambda n: ast.Pass()
    if isinstance(node, ast.If):
        yield lambda n: _with(n, test=ast.Constant(False))
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        yield lambda n: ast.Assign([n.target], n.value)
    body = getattr(node, "body", None)
    if isinstance(node, ast.FunctionDef) and isinstance(body, list):
        for i in range(len(body) - 1):
            if isinstance(body[i], ast.Assign) and isinstance(body[i + 1], ast.Assign):
                yield lambda n, i=i: _with(n, body=[*n.body[:i], n.body[i + 1], n.body[i], *n.body[i + 2 :]])
        for i in range(len(body) - 3):  # q, k, q, k: two steps of both, in the other order
            if all(isinstance(x, ast.Assign) for x in body[i : i + 4]) and ast.unparse(body[i].targets[0]) == ast.unparse(
                body[i + 2].targets[0]
            ):
                yield lambda n, i=i: _with(n, body=[*n.body[:i], *n.body[i + 2 : i + 4], *n.body[i : i + 2], *n.body[i + 4 :]])


def _slices(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    if isinstance(node, ast.Slice) and (node.lower is None) != (node.upper is None):
        yield lambda n: _with(n, lower=n.upper, upper=n.lower)


RULES = (_operators, _constants, _names, _calls, _statements, _slices)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
