"""A model's own inputs of its attention layers, as requests to a service that has these layers.

    captured = capture(model, "The cat sat", client, tokenizer=tokenizer)    # or the model's arguments: {"input_ids": …}
    captured.link                                                            # the page, which shows each layer and head
    captured.save("bert.safetensors")                                        # a file that the page opens when it is dropped
    captured["bert-encoder-3"].request                                       # fields of `client.attend`

Each layer is computed by the service once, and its weights are compared with the model's own.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attend.client.client import Client
from attend.client.model_calls import VISIBLE, Call, batch_first, given_mask, has_batch_second, requests_of, seen_rows, words_of
from attend.client.model_inputs import check_cache, model_arguments
from attend.client.notebook import heat_maps
from attend.errors import InvalidRequest, RequestError
from attend.spec import LayerSpec
from attend.tensors import Array
from attend.wire.safetensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from attend.client.recording import AttentionLayer

FORM = "1"  # of the file
TENSORS = ("query", "key", "value", "positions", "key_positions", *VISIBLE)  # of a request
CLOSE = 1e-4  # of the largest value: the service and the model agree
WEIGHT = "weights/"  # before the name of a weight in a file
OUTPUT = "model/output"  # in a file: what the layer gave in the model


@dataclass(frozen=True)
class CapturedLayer:
    """One call of an attention layer: its spec and weights, its inputs in the model, and what the model computed.

    `difference`: the largest, between the service's attention weights and the model's own. Where these are not known, or are not what the
    model multiplies values with (weights without sinks, or of each softmax), between the outputs, relative to the largest output. Rows
    that see no key do not count: they are padding, and models and kernels differ in what they give there.
    """

    name: str  # in the service
    part: str  # of the model: encoder, decoder, cross, …
    number: int
    spec: LayerSpec
    weights: Mapping[str, Array]
    request: Mapping[str, Any]  # fields of POST /attend without the layer
    fingerprint: str = ""  # of the layer in the service
    difference: float = np.nan
    attention_weights: Array | None = None  # the model's own, or else the service's, [b, h, q, k]; without b for a batch of one
    output: Array | None = None  # the model's own, if it is that of this layer alone
    others: tuple[Mapping[str, Any], ...] = ()  # requests with other masks, one of which repeats the call, until that is known

    def __repr__(self) -> str:
        rows, keys = (self.request.get(name, self.request["query"]).shape[-2] for name in ("query", "key"))
        shape = f"{self.spec.num_heads} heads, {rows} queries, {keys} keys"
        return f"CapturedLayer({self.name!r}, {self.about}, {shape}, request {list(self.request)}, difference {self.shown_difference})"

    @property
    def agrees(self) -> bool:
        return self.difference <= CLOSE

    @property
    def shown_difference(self) -> str:
        """The difference as text; "unknown" if it is NaN, and whether that is because no row counts."""
        if not np.isnan(self.difference):
            return f"{self.difference:.1e}"
        return "unknown" if seen_rows(self.request, self.spec).any() else "unknown: no row sees a key"

    @property
    def about(self) -> str:
        """Its place in the model."""
        return f"layer {self.number}" + (f" of the {self.part}" if self.part else "")


@dataclass(frozen=True)
class Capture(Mapping[str, CapturedLayer]):
    """The captured layers by name, in the model's order. A notebook shows the heads of the first layer of each part.

    `skipped`: of the layers that are not there, why. `link`: the page that shows it; "" if it is in no service.
    `effects`: what each head does to the model's answer, if that was studied: `answer`, its `probability`, and `change`, that of the
    logarithm of the probability without each head, a list for each layer by name.
    """

    name: str
    layers: Mapping[str, CapturedLayer]
    skipped: Mapping[str, str] = field(default_factory=dict)
    link: str = ""
    effects: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> CapturedLayer:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return (
            f"Capture({self.name!r}, {len(self)} layers, largest difference {self.shown_difference}{', ' if self.link else ''}{self.link})"
        )

    @property
    def difference(self) -> float:
        """The largest of all layers; NaN if there is one that is not known."""
        return float(np.max([layer.difference for layer in self.values()]))

    @property
    def shown_difference(self) -> str:
        """The largest difference as text; if there is one that is not known, that of this layer."""
        return max(self.values(), key=lambda layer: (np.isnan(layer.difference), layer.difference)).shown_difference

    def to_bytes(self, weights: bool = True) -> bytes:
        """A safetensors file of the inputs of each layer, and its weights: all that a page or a service needs to show it."""
        tensors: dict[str, Array] = {}
        documents = []
        for layer in self.values():
            own = {name: np.asarray(value) for name, value in layer.request.items() if name in TENSORS}
            own |= {f"{WEIGHT}{name}": array for name, array in layer.weights.items()} if weights else {}
            own |= {OUTPUT: layer.output} if layer.output is not None and weights else {}
            tensors |= {f"{layer.name}/{name}": array for name, array in own.items()}
            documents.append(
                {
                    **{name: getattr(layer, name) for name in ("name", "part", "number", "fingerprint")},
                    "difference": None if np.isnan(layer.difference) else layer.difference,
                    "spec": json.loads(layer.spec.model_dump_json(exclude={"seed", "gain"})),
                    "request": {name: value for name, value in layer.request.items() if name not in TENSORS},
                }
            )
        document = {"form": FORM, "name": self.name, "layers": documents, "skipped": dict(self.skipped)}
        document |= {"effects": dict(self.effects)} if self.effects else {}
        return b"".join(write_tensors(tensors, {"capture": json.dumps(document)}))

    def save(self, path: str | Path) -> Path:
        """Write the file, which the page opens when it is dropped there."""
        Path(path).write_bytes(self.to_bytes())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Capture":
        """Read a file that `save` wrote. Raises InvalidRequest for another file."""
        tensors, metadata = read_tensors(Path(path).read_bytes())
        if "capture" not in metadata:
            raise InvalidRequest.where("/__metadata__/capture", "a file of attend capture", f"another file, {path}")
        document = json.loads(metadata["capture"])
        layers = {}
        for fields in document["layers"]:
            start = f"{fields['name']}/"
            own = {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}
            weights = {name.removeprefix(WEIGHT): array for name, array in own.items() if name.startswith(WEIGHT)}
            fields["difference"] = np.nan if fields["difference"] is None else fields["difference"]
            request = fields.pop("request") | {name: array for name, array in own.items() if name in TENSORS}
            spec = LayerSpec.model_validate(fields.pop("spec"))
            layers[fields["name"]] = CapturedLayer(**fields, spec=spec, weights=weights, request=request, output=own.get(OUTPUT))
        return cls(document["name"], layers, document["skipped"], effects=document.get("effects"))

    def with_effects(self, answer: str, probability: float, change: Array) -> "Capture":
        """The capture with what each head does to the model's answer, which its file and the page then have.

        `change`: [layers, heads], the change of the logarithm of the answer's probability without each head, as `Interventions.effects`
        returns it, of the captured layers in their order. Raises InvalidRequest for another number of layers.
        """
        if len(change) != len(self):
            raise InvalidRequest.where("/change", f"a row for each of the {len(self)} captured layers", str(len(change)))
        rows = {
            name: [number for number in row if not np.isnan(number)] for name, row in zip(self, np.asarray(change).tolist(), strict=True)
        }
        return replace(self, effects={"answer": answer, "probability": probability, "change": rows})

    def put(self, client: Client) -> "Capture":
        """Add its layers to a service, compute each once and compare; layers whose call the service refuses are skipped.

        Returns the capture with the differences. Raises what `Client` raises.
        """
        layers, skipped = {}, dict(self.skipped)
        for layer in self.values():
            metadata = {"spec": layer.spec.model_dump_json(exclude={"seed", "gain"})}
            put = client.put_layer_file(layer.name, b"".join(write_tensors(dict(layer.weights), metadata)))
            try:
                layers[layer.name] = replace(_computed(layer, client), fingerprint=put.fingerprint)
            except RequestError as refusal:
                skipped[layer.name] = str(refusal)
        if not layers:
            raise InvalidRequest.where("", "a layer that the service computes", f"none: {'; '.join(dict.fromkeys(skipped.values()))}")
        return replace(self, layers=layers, skipped=skipped)

    def _repr_html_(self) -> str:
        """The heads of the first layer of each part, and the differences of all layers."""
        shown = {layer.part: layer for layer in reversed(list(self.values()))}
        maps = [
            heat_maps(layer.attention_weights, {}, layer.request.get("tokens", {}), f"{layer.name}, {layer.about}") or ""
            for layer in reversed(shown.values())
            if layer.attention_weights is not None
        ]
        link = f'<a href="{escape(self.link)}">all layers and heads</a>; ' if self.link else ""
        notes = [f"{name} is not there: {why}" for name, why in self.skipped.items()]
        for layer in self.values():
            if not layer.agrees:
                is_known = not np.isnan(layer.difference)
                notes.append(f"{layer.name} {'differs from' if is_known else 'is not compared with'} the model: {layer.shown_difference}")
        about = f"{escape(self.name)}: {link}largest difference from the model {self.shown_difference}"
        return f"<div>{about}</div>{''.join(maps)}{''.join(f'<div>{escape(note)}</div>' for note in notes)}"


def capture(
    model: Any,
    inputs: Mapping[str, Any] | str,
    client: Client,
    *,
    tokenizer: Any = None,
    name: str = "",
    layers: Iterable[int] | None = None,
    layout: str | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Capture:
    """Run a model once, and put its attention layers with the inputs that they got into a service.

    `model`: of transformers, or a torch module whose attention layers have names of a known layout, such as `nn.MultiheadAttention`.
    `inputs`: its arguments, or a text for its tokenizer, which also gives the words of tokens. `name`: the layers are NAME-PART-NUMBER.
    `layers`: numbers of those to capture, all if None. Of a torch module, `layout` is needed where the names of its tensors fit several,
    and `spec` has the fields that its tensors do not determine, as num_heads.
    Raises InvalidRequest if no layer of the model is one that the service computes, and what `Client` raises.
    """
    from attend.client.recording import Recorder, as_arrays, attention_layers

    arguments = model_arguments(inputs, tokenizer)
    check_cache(arguments)
    found, skipped = attention_layers(model, layout, spec)
    chosen, numbers = set(layers) if isinstance(layers, Iterable) else layers, {layer.number for layer in found}
    if chosen is not None and not (isinstance(chosen, set) and chosen and chosen <= numbers):
        got = str(sorted(chosen) if isinstance(chosen, set) else chosen)
        raise InvalidRequest.where("/layers", f"numbers of its layers, of {sorted(numbers)}", got)
    wanted = [layer for layer in found if chosen is None or layer.number in chosen]
    with Recorder(model, wanted) as recorder:
        recorder.run(arguments)
    arrays, name = as_arrays(arguments), name or _name_of(model)
    several = len({layer.part for layer in found}) > 1
    captured, taken = {}, Counter[Any]()
    for layer in wanted:
        own = "-".join([name, *([layer.part] if several else []), str(layer.number)])
        place = layer.modules["query"], layer.modules["key"]  # which layers may share: each call belongs to the next of them
        calls = recorder.calls(layer)[taken[place] :]
        taken[place] += 1
        try:
            if calls:
                captured[own] = _captured(own, layer, calls[0], arrays, tokenizer)
            else:
                skipped[own] = "the model did not call it in this pass"
        except InvalidRequest as refusal:
            skipped[own] = str(refusal)
    return Capture(name, captured, skipped).put(client)


def _captured(name: str, layer: "AttentionLayer", call: Call, arguments: Mapping[str, Array], tokenizer: Any) -> CapturedLayer:
    """The layer with the requests that repeat its call. Raises InvalidRequest if what its module gives is not that of the layer alone."""
    if has_batch_second(call, arguments, layer.part):
        if layer.modules["output"] is layer.modules["query"]:
            expected = (
                "a layer that gets rows [batch, rows, width], or whose projections of queries and of the output are modules of their own"
            )
            got = f"rows {list(call.inputs['query'].shape)} in a {type(layer.modules['query']).__name__}"
            raise InvalidRequest.where("", expected, got)
        call = batch_first(call)
    queries, keys = call.inputs["query"].shape[1], call.inputs["key"].shape[1]
    words = words_of(arguments, layer.part, tokenizer, queries, keys)
    requests = requests_of(call, layer.spec, layer.causal, given_mask(arguments, layer.part))
    request, *others = [one | ({"tokens": words} if words else {}) for one in requests]
    is_alone = len(call.inputs["query"]) == 1
    weights, output = (None if x is None else x[0] if is_alone else x for x in (call.weights, call.output))
    return CapturedLayer(
        name, layer.part, layer.number, layer.spec, layer.weights, request, attention_weights=weights, output=output, others=tuple(others)
    )


def _computed(layer: CapturedLayer, client: Client) -> CapturedLayer:
    """The layer with its difference, by the request that repeats its call. Raises what `Client.attend` raises."""
    compared = []
    for request in (layer.request, *layer.others):
        reply = client.attend(**request, layer=layer.name, outputs=["output", "attention_weights"])
        seen = seen_rows(request, layer.spec)  # [b, h, q], without b for a batch of one
        of_weights = _largest(reply.attention_weights, layer.attention_weights, seen)
        of_outputs = _largest(reply.output, layer.output, np.asarray(seen.all(-2)), relative=True)
        if np.isnan(of_weights) or of_outputs <= CLOSE < of_weights:
            compared.append((of_outputs, request, reply.attention_weights, layer.output))
        else:  # an output that differs although the weights agree is that of more than this layer
            output = None if of_weights <= CLOSE < of_outputs else layer.output
            compared.append((of_weights, request, layer.attention_weights, output))
    difference, request, weights, output = min(compared, key=lambda one: (np.isnan(one[0]), one[0]))
    return replace(layer, request=request, others=(), difference=difference, attention_weights=weights, output=output)


def _largest(mine: Array, own: Array | None, seen: Array, relative: bool = False) -> float:
    """The largest difference in the rows that `seen` selects, [..., rows]; NaN without any, or if the model's own are not known.

    `relative`: to the largest number of the model's own.
    """
    if own is None or own.shape != mine.shape:
        return float("nan")
    rows = np.broadcast_to(seen, own.shape[:-1])
    if not rows.any():
        return float("nan")
    return float(np.abs(mine[rows] - own[rows]).max() / (np.abs(own[rows]).max() if relative else 1))


def _name_of(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__).replace("/", "-")
