"""`merge`: attention over all keys from the results of several services over parts of the keys. NumPy only.

The softmax over a union of keys follows from the softmax over each part and the log-sum-exp of its scores, as in flash-attention (Dao et
al. 2022, section 3.1). So a sequence that is too long for one server can be split along its keys: each server returns `head_outputs` and
`log_sum_exp`, with `query_offset` relative to its first key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from service.errors import InvalidRequest
from service.tensors import Array, datatype_of

SINK_TOLERANCE = 8  # rounding units by which a log-sum-exp may be below the sink that it includes


def merge(
    replies: Sequence[Mapping[str, Any]],
    *,
    sinks: ArrayLike | None = None,
    output_weight: ArrayLike | None = None,
    output_bias: ArrayLike | None = None,
) -> dict[str, Array]:
    """`head_outputs` and `log_sum_exp` of the same queries over the keys of all replies, and `output` if its projection is given.

    Each reply has `head_outputs` [b, h, q, d] and `log_sum_exp` [b, h, q], or both without b: a result of `attend` or of `merge`. All have
    the same layer and query and disjoint keys, with `fully_masked: zero` and without dropout. Rows without a visible key are zeros and
    -inf, in replies and in the result. Every reply of a layer with sinks includes the sink: with the layer's `sinks` [h] it is counted
    once. `output_weight` [output_dim, h*d] and `output_bias` [output_dim] are the layer's `output.weight` and `output.bias`.

    A layer with a weighted norm after RoPE cannot be split, since its scores depend on absolute positions.

    Computed in float64 and returned in the dtypes of the replies. With L_i the log-sum-exp and s the sink, over the n parts with a key:
    L = log(Σ exp L_i - (n - 1) exp s), and the heads' output is Σ exp(L_i - L) o_i.
    Raises InvalidRequest for shapes that do not fit and numbers that contradict these conditions.
    """
    if not replies:
        raise InvalidRequest.where("/replies", "at least one reply", "none")
    heads = [_read(reply, i, "head_outputs") for i, reply in enumerate(replies)]
    logs = [_read(reply, i, "log_sum_exp") for i, reply in enumerate(replies)]
    _check_shapes(heads, logs)
    dtypes = (np.result_type(*heads), np.result_type(*logs))
    outputs, lse = np.stack(heads).astype(np.float64), np.stack(logs).astype(np.float64)  # [n, (b,) h, q, d], [n, (b,) h, q]
    _check_numbers(outputs, lse)

    highest = lse.max(axis=0)
    highest = np.where(np.isneginf(highest), 0.0, highest)
    repeated_sinks: Array | float = 0.0
    if sinks is not None:
        sink = _sink_column(sinks, lse.shape[-2])  # [h, 1]
        lse = _above_sinks(lse, sink, logs)
        highest = np.maximum(highest, sink)
        repeated_sinks = np.maximum((~np.isneginf(lse)).sum(axis=0) - 1, 0) * np.exp(sink - highest)
    shares = np.exp(lse - highest)  # 0 for a part without keys
    total = shares.sum(axis=0) - repeated_sinks
    divisor = np.where(total == 0, 1.0, total)
    merged = (shares[..., None] * outputs).sum(axis=0) / divisor[..., None]
    with np.errstate(divide="ignore"):
        result = {"head_outputs": merged.astype(dtypes[0]), "log_sum_exp": (highest + np.log(total)).astype(dtypes[1])}
    if output_weight is not None:
        result["output"] = _project(merged, np.asarray(output_weight), output_bias).astype(dtypes[0])
    elif output_bias is not None:
        raise InvalidRequest.where("/output_bias", "an output_weight with it", "output_bias alone")
    return result


def _read(reply: Mapping[str, Any], i: int, name: str) -> Array:
    """One output of one reply as an array; lists from JSON, with "-inf" as text, become float64."""
    if name not in reply:
        raise InvalidRequest.where(f"/replies/{i}/{name}", "both head_outputs and log_sum_exp", f"only {', '.join(reply) or 'nothing'}")
    given = reply[name]
    try:
        return given if isinstance(given, np.ndarray) and datatype_of(given).kind == "float" else np.asarray(given, np.float64)
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest.where(f"/replies/{i}/{name}", "numbers", type(given).__name__) from None


def _check_shapes(heads: Sequence[Array], logs: Sequence[Array]) -> None:
    first = heads[0].shape
    if len(first) not in (3, 4):
        raise InvalidRequest.where("/replies/0/head_outputs", "shape [b, h, q, d] or [h, q, d]", str(list(first)))
    for i, (head, log) in enumerate(zip(heads, logs, strict=True)):
        for name, shape, wanted in (("head_outputs", head.shape, first), ("log_sum_exp", log.shape, first[:-1])):
            if shape != wanted:
                raise InvalidRequest.where(f"/replies/{i}/{name}", f"shape {list(wanted)}, as the first reply has it", str(list(shape)))


def _check_numbers(outputs: Array, lse: Array) -> None:
    for name, wrong, expected in (
        ("log_sum_exp", np.isnan(lse) | np.isposinf(lse), "numbers or -inf"),
        ("head_outputs", ~np.isfinite(outputs), "finite numbers"),
        ("head_outputs", np.isneginf(lse)[..., None] & (outputs != 0), "zeros where log_sum_exp is -inf (fully_masked: zero)"),
    ):
        if wrong.any():
            i, *place = np.argwhere(wrong)[0].tolist()
            number = (lse if name == "log_sum_exp" else outputs)[(i, *place)]
            raise InvalidRequest.where(f"/replies/{i}/{name}/{'/'.join(map(str, place))}", expected, str(number))


def _sink_column(sinks: ArrayLike, heads: int) -> Array:
    column = np.asarray(sinks, np.float64)
    if column.shape != (heads,):
        raise InvalidRequest.where("/sinks", f"shape [{heads}], one for each head", str(list(column.shape)))
    return column[:, None]


def _above_sinks(lse: Array, sink: Array, logs: Sequence[Array]) -> Array:
    """The log-sum-exp, raised to the sink where rounding made it smaller. Raises InvalidRequest if it does not include the sink."""
    rounding = max(float(np.finfo(log.dtype).eps) if log.dtype.kind == "f" else 2.0**-7 for log in logs)
    wrong = np.isfinite(lse) & (lse < sink - SINK_TOLERANCE * rounding * (1 + np.abs(sink)))
    if wrong.any():
        i, *place = np.argwhere(wrong)[0].tolist()
        at = f"/replies/{i}/log_sum_exp/{'/'.join(map(str, place))}"
        limit, got = sink[place[-2], 0], lse[(i, *place)]
        raise InvalidRequest.where(at, f"at least {limit:.6g}, the sink that it includes", f"{got:.6g}")
    return np.where(np.isneginf(lse), lse, np.maximum(lse, sink))


def _project(heads: Array, weight: Array, bias: ArrayLike | None) -> Array:
    """[(b,) h, q, d] -> [(b,) q, output_dim]: concatenated heads, projected."""
    concatenated = np.moveaxis(heads, -3, -2).reshape(*heads.shape[:-3], heads.shape[-2], -1)
    if weight.ndim != 2 or weight.shape[1] != concatenated.shape[-1]:
        raise InvalidRequest.where("/output_weight", f"shape [output_dim, {concatenated.shape[-1]}]", str(list(weight.shape)))
    projected: Array = concatenated @ weight.astype(np.float64).T
    if bias is None:
        return projected
    added = np.asarray(bias, np.float64)
    if added.shape != weight.shape[:1]:
        raise InvalidRequest.where("/output_bias", f"shape [{weight.shape[0]}]", str(list(added.shape)))
    return projected + added
