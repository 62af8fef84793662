"""What heads do to a model's answer: runs of a model with heads switched off, scaled, or with the weights or outputs of another run.

    with attend.interventions(model, client) as study:
        plain = study.run(inputs)
        without = study.run(inputs, attend.Change(layer=5, heads=[1], scale=0))
        plain.probability(token), without.probability(token)
        study.effects(inputs, lambda run: run.probability(token))       # [layers, heads]: the same for every head

The model is one of transformers that takes attention functions; the service computes the attention of each of its layers.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from attend.client.client import Client
from attend.client.model_calls import real_queries, visible_pairs
from attend.client.model_inputs import model_arguments
from attend.client.responses import AttendResult
from attend.errors import InvalidRequest
from attend.tensors import Array
from attend.wire.client_codec import from_torch

FINAL_NORMS = {  # model_type -> the norm between the residual stream and the output embeddings
    "gpt2": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "model.norm"),
}


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One pass of a model: its logits, and of each layer the weights and outputs of its heads."""

    logits: Array  # [b, n, classes], or [b, classes]
    loss: float | None  # if there are labels among the inputs
    attention_weights: list[Array]  # [b, h, q, k]
    head_outputs: list[Array]  # [b, h, q, d], before the output projection

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4g}, "
        return f"Run(logits {list(self.logits.shape)}, {loss}{len(self.attention_weights)} layers)"

    def probability(self, token: int, position: int = -1, item: int = 0) -> float:
        """The probability of a token, or another class, at a position of a batch item. Raises InvalidRequest for a token's text."""
        token = _token_number(token, self.logits.shape[-1])
        row = self.logits[item].astype(np.float64)
        row = row[position] if row.ndim == 2 else row
        shifted = np.exp(row - row.max())
        return float(shifted[token] / shifted.sum())


@dataclass(frozen=True, eq=False)
class Change:
    """A change of some heads of a layer.

    `layer`: its number in `Interventions.layers`. `heads` and `queries`: those that are changed, all if None.
    `scale`: a factor on the outputs of the heads in all queries; 0 switches them off.
    `pattern`: attention weights, `[b,h,q,k]` or broadcast to it; those of another run; "uniform" over the keys that each query
    may attend to; "mean" over the items of the batch; "diagonal", each query attends to itself.
    `outputs`: outputs of the heads, `[b,h,q,d]` or broadcast to it; those of another run; "mean" over items and queries.
    Rows of padding, where the model's arguments say which they are, are in no mean.
    """

    layer: int
    heads: Sequence[int] | None = None
    scale: float | None = None
    pattern: Literal["uniform", "mean", "diagonal"] | Run | Array | None = None
    outputs: Literal["mean"] | Run | Array | None = None
    queries: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for fields that no model has."""
        for name, given, rank in (("layer", self.layer, 0), ("heads", self.heads, 1), ("queries", self.queries, 1)):
            array = np.asarray(np.zeros((1,) * rank, int) if given is None and rank else given)
            if array.dtype.kind not in "iu" or array.ndim != rank or not array.size:
                expected = "a list of one or more integers, or None for all" if rank else "the number of a layer"
                raise InvalidRequest.where(f"/{name}", expected, repr(given))
        if self.scale is None and self.pattern is None and self.outputs is None:
            raise InvalidRequest.where("", "scale, pattern or outputs", "a change without them")
        if self.queries is not None and self.scale is not None:
            raise InvalidRequest.where("/queries", "none beside scale, which is of all queries; outputs=0 switches off some", "both")


class Interventions:
    """A model whose attention a service computes in the `with` block, with changes of heads: a float64 model in float64, others in
    float32. The layers without projections that it needs are removed from the service at the end of the block."""

    def __init__(self, model: Any, client: Client, tokenizer: Any = None) -> None:
        self.model, self.client, self.tokenizer = model, client, tokenizer
        if not hasattr(model, "set_attn_implementation"):
            expected = "a model of transformers, as AutoModelForCausalLM.from_pretrained(NAME) returns it"
            raise InvalidRequest.where("/model", expected, f"the text {model!r}" if isinstance(model, str) else type(model).__name__)
        self._layers: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._stack, self._is_entered = ExitStack(), False
        self._changes: Sequence[Change] = ()
        self._arguments: Mapping[str, Array] = {}
        self._calls: list[tuple[Any, AttendResult]] | None = None  # module and reply of each, in the current run

    @property
    def layers(self) -> list[str]:
        """The names of the attention modules in the order of their calls in the last run, by which a `Change` numbers layers.

        Raises InvalidRequest before the first run.
        """
        if not self._layers:
            raise InvalidRequest.where("/layers", "a run before, which shows in what order the layers are called", "none")
        return self._layers

    def __enter__(self) -> Self:
        from attend.client.transformers import Attention, replaced_attention

        self._attention = Attention(self.client, compute=self._compute)
        self._stack.callback(self._attention.remove_layers)
        self._stack.enter_context(replaced_attention(self.model, self._attention))
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_entered = False
        self._stack.close()

    def run(self, inputs: Mapping[str, Any] | str, *changes: Change) -> Run:
        """One pass of the model, without gradients and dropout. `inputs`: its arguments, or a text if there is a tokenizer.

        Raises InvalidRequest for a model without logits or with attention of its own, for changes that do not fit it, and what
        `Client.attend` raises.
        """
        from attend.client.recording import as_arrays, one_pass
        from attend.client.transformers import to_float

        if wrong := [change for change in changes if not isinstance(change, Change)]:
            raise InvalidRequest.where("", "changes of the type attend.Change", repr(wrong[0]))
        arguments = model_arguments(inputs, self.tokenizer)
        calls: list[tuple[Any, AttendResult]] = []
        self._changes, self._calls, self._arguments = changes, calls, as_arrays(arguments)
        try:
            outputs = one_pass(self.model, arguments)
        finally:
            self._changes, self._calls, self._arguments = (), None, {}  # what else calls the model in the block gets no changes
        if not calls:
            where, own = "a run in the `with` block", f"{type(self.model).__name__}, whose attention is code of its own"
            expected = "a model that takes attention functions of transformers"
            raise InvalidRequest.where("", *((expected, own) if self._is_entered else (where, "one outside")))
        if getattr(outputs, "logits", None) is None:
            raise InvalidRequest.where("", "a model with logits, such as one of AutoModelForCausalLM", type(self.model).__name__)
        self._layers = [self._names[module] for module, _ in calls]
        for change in changes:
            if not 0 <= change.layer < len(self._layers):
                raise InvalidRequest.where("/layer", f"a layer below {len(self._layers)}", str(change.layer))
        loss = getattr(outputs, "loss", None)
        replies = [reply for _, reply in calls]
        return Run(
            from_torch(to_float(outputs.logits)),
            None if loss is None else float(loss),
            [reply.attention_weights for reply in replies],
            [reply.head_outputs for reply in replies],
        )

    def effects(self, inputs: Mapping[str, Any] | str, measure: Callable[[Run], Any], **change: Any) -> Array:
        """What a change of each head alone does: `measure` of that run, less `measure` of the plain one, `[layers,heads,…]`.

        `change` has fields of `Change` beside layer and heads; if there are none, heads are switched off. NaN where a layer has
        fewer heads.
        """
        plain = self.run(inputs)
        before, heads = np.asarray(measure(plain), np.float64), [weights.shape[1] for weights in plain.attention_weights]
        found = np.full((len(heads), max(heads), *before.shape), np.nan)
        for layer, count in enumerate(heads):
            for head in range(count):
                found[layer, head] = measure(self.run(inputs, Change(layer, [head], **(change or {"scale": 0.0})))) - before
        return found

    def attribution(
        self, inputs: Mapping[str, Any] | str, token: int, other: int | None = None, position: int = -1, item: int = 0
    ) -> Array:
        """What each head adds to the logit of a token, or to its difference from that of another token, `[layers,heads]`, directly: through
        its output projection, the final norm with the statistics of this run, and the output embeddings; not through later layers.

        Raises InvalidRequest for a family whose final norm is not known, and for a token's text.
        """
        from attend.client.recording import attention_layers

        family = self.model.config.model_type
        if family not in FINAL_NORMS:
            raise InvalidRequest.where("", f"a model whose final norm is known, one of {', '.join(FINAL_NORMS)}", family)
        seen: list[Any] = []
        norm = self.model.get_submodule(FINAL_NORMS[family])
        handle = norm.register_forward_hook(lambda _, values, result: seen.append((values[0][item, position], result[item, position])))
        try:
            run = self.run(inputs)
        finally:
            handle.remove()
        embeddings = self.model.get_output_embeddings().weight.detach()
        direction = embeddings[_token_number(token, len(embeddings))]
        if other is not None:
            direction = direction - embeddings[_token_number(other, len(embeddings))]
        before, after = seen[-1]
        direction = _through_norm(norm, before, after, direction)
        weights = {layer.modules["query"]: layer.weights["output.weight"] for layer in attention_layers(self.model)[0]}
        added = []
        for name, outputs in zip(self.layers, run.head_outputs, strict=True):
            modules = self.model.get_submodule(name).modules()
            matrix = next(weights[part] for part in modules if part in weights)  # [d_model, h * d]
            heads = outputs[item, :, position].astype(np.float64)  # [h, d]
            added.append(((direction @ matrix).reshape(heads.shape) * heads).sum(-1))
        return np.stack(added)

    def _compute(self, module: Any, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> AttendResult:
        """The reply to a call of the attention function, with the changes of its layer."""
        if self._calls is None:
            return self._attention.attend(fields)
        number = len(self._calls)
        changes = [change for change in self._changes if change.layer == number]
        real = real_queries(self._arguments, "decoder" in self._names[module].split("."), shapes["pattern"][2:])
        reply = self._attention.attend({**fields, **self._changed(changes, fields, shapes, real)} if changes else fields)
        self._calls.append((module, reply))
        return reply

    def _changed(
        self, changes: Sequence[Change], fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], real: Array | None
    ) -> dict[str, Any]:
        """The fields of a request that make these changes. `shapes`: [b, h, q, k] of `pattern`, [b, h, q, d] of `head_outputs`.
        `real`, bool [b, q]: the rows that are not padding, all if None."""
        needs_plain = any(isinstance(given, str) and given == "mean" for change in changes for given in (change.pattern, change.outputs))
        plain = self._attention.attend(fields) if needs_plain else None
        counted = np.broadcast_to(True if real is None else real[:, None, :, None], (*shapes["pattern"][:3], 1))
        scale = np.ones(shapes["pattern"][1])
        given: dict[str, Any] = {}
        for change in changes:
            rows = _rows(change, shapes["pattern"][:3])
            if change.scale is not None:
                scale[rows.any((0, 2))] *= change.scale
            replaced = {
                "pattern": _pattern(change, fields, plain, shapes["pattern"], counted),
                "head_outputs": _outputs(change, plain, counted),
            }
            for name, values in replaced.items():
                if values is None:
                    continue
                try:
                    whole = np.broadcast_to(values, shapes[name])
                except ValueError:
                    expected = f"a shape that broadcasts to {list(shapes[name])}, in layer {change.layer}"
                    raise InvalidRequest.where(f"/{name}", expected, f"shape {list(values.shape)}") from None
                rows_name = f"{name.removesuffix('s')}_rows"
                given[name] = np.where(rows[..., None], whole, given.get(name, np.float32(0)))
                given[rows_name] = rows | given.get(rows_name, False)
        return {"head_scale": scale, **given}


def interventions(model: Any, client: Client, *, tokenizer: Any = None) -> Interventions:
    """Runs of a model of transformers with changes of its heads, in a `with` block. With a `tokenizer`, inputs may be texts."""
    return Interventions(model, client, tokenizer)


def _token_number(token: Any, count: int) -> int:
    """The number of one of `count` tokens as an int. Raises InvalidRequest for anything else, such as its text."""
    with suppress(TypeError):
        if -count <= (number := operator.index(token)) < count:
            return number
    raise InvalidRequest.where("/token", f"the number of a token, below {count}, such as tokenizer(TEXT).input_ids[0]", repr(token))


def _rows(change: Change, shape: tuple[int, ...]) -> Array:
    """bool [b, h, q]: the rows that are changed. Raises InvalidRequest for heads and queries that there are not."""
    _, heads, queries = shape
    for name, chosen, count in (("heads", change.heads, heads), ("queries", change.queries, queries)):
        for i, index in enumerate(() if chosen is None else chosen):
            if not -count <= index < count:
                raise InvalidRequest.where(f"/{name}/{i}", f"an index below {count}, in layer {change.layer}", str(index))
    rows = np.zeros(shape, bool)
    of_heads = range(heads) if change.heads is None else change.heads
    of_queries = range(queries) if change.queries is None else change.queries
    rows[:, np.asarray(of_heads, int)[:, None], np.asarray(of_queries, int)] = True
    return rows


def _pattern(change: Change, fields: Mapping[str, Any], plain: AttendResult | None, shape: tuple[int, ...], counted: Array) -> Array | None:
    """The weights of a change, to be broadcast to [b, h, q, k]. `counted`, [b, h, q, 1]: the rows that are in means."""
    items, _, queries, keys = shape
    given = change.pattern
    if isinstance(given, Run):
        return given.attention_weights[change.layer]
    if not isinstance(given, str):
        return None if given is None else np.asarray(given)
    if given == "uniform":
        visible = visible_pairs(fields["bias"])[-1]
        visible = np.ones((queries, keys)) if visible is None else np.broadcast_to(visible, (*visible.shape[:2], queries, keys))
        return np.asarray(visible / np.maximum(visible.sum(-1, keepdims=True), 1))
    if given == "mean" and plain is not None:
        if items == 1:
            raise InvalidRequest.where("/pattern", "a batch of several items, over which the mean is", "one item")
        return _mean(plain.attention_weights, counted, 0)
    if given == "diagonal":
        if queries != keys:
            raise InvalidRequest.where("/pattern", f"as many keys as queries, in layer {change.layer}", f"{queries} and {keys}")
        return np.eye(queries)
    raise InvalidRequest.where("/pattern", "uniform, mean, diagonal, a run or an array", given)


def _outputs(change: Change, plain: AttendResult | None, counted: Array) -> Array | None:
    """The outputs of a change, to be broadcast to [b, h, q, d]. `counted`, [b, h, q, 1]: the rows that are in means."""
    given = change.outputs
    if isinstance(given, Run):
        return given.head_outputs[change.layer]
    if not isinstance(given, str):
        return None if given is None else np.asarray(given)
    if given == "mean" and plain is not None:
        return _mean(plain.head_outputs, counted, (0, 2))
    raise InvalidRequest.where("/outputs", "mean, a run or an array", given)


def _mean(values: Array, counted: Array, axes: int | tuple[int, ...]) -> Array:
    """The mean over these axes of the rows that count; of none it is 0."""
    return np.asarray((values * counted).sum(axes, keepdims=True) / np.maximum(counted.sum(axes, keepdims=True), 1))


def _through_norm(norm: Any, before: Any, after: Any, direction: Any) -> Array:
    """The direction of the residual stream whose product with it is that of `direction` with the norm of it, less biases, for the
    statistics of the row `before`, of which `after` is the norm."""
    x, y, d = (tensor.double().cpu().numpy() for tensor in (before, after, direction))
    if type(norm).__name__ == "LayerNorm":
        d = d * norm.weight.detach().double().cpu().numpy() / np.sqrt(x.var() + norm.eps)
        return np.asarray(d - d.mean())
    gain = norm(before.new_ones(before.shape)).detach().double().cpu().numpy()  # the root mean square of ones is 1
    scaled = gain * x
    return np.asarray(d * gain * (y @ scaled) / (scaled @ scaled))
