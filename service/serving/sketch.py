"""A valid request for a picture and a layer -> what to compute for it, and what to draw of that.

The weights are not replied but reduced where they are made, to no more cells than a picture has room for: so a picture costs the memory
of a call that asks for no weights, at any length.
"""

from dataclasses import dataclass, replace

from service.attention.call import Result
from service.attention.figures import FigureSpec, Format, Picture, compose, reduction_for
from service.errors import InvalidRequest, NotAcceptable, TooLarge
from service.serving.bind import bind
from service.serving.bound import Bound
from service.serving.catalogue import HeldLayer
from service.serving.cost import ServingLimits, check, predict
from service.wire.figure import FigureRequest
from service.wire.negotiation import PICTURES

HEADS = 256  # side by side in one picture


@dataclass(frozen=True, slots=True)
class Sketch:
    """A bound call, and the picture that its result will become."""

    bound: Bound
    spec: FigureSpec

    @property
    def media_type(self) -> str:
        return next(media for media, form in PICTURES.items() if form == self.spec.format)

    def picture(self, result: Result) -> Picture:
        layer = self.bound.layer
        return compose(self.spec, result.tensors, {"Source": f"layer {layer.name}", "Fingerprint": layer.fingerprint})


def sketch(request: FigureRequest, layer: HeldLayer, accepted: str, limits: ServingLimits) -> Sketch:
    """The sketch of a request that fits the layer; `accepted` is the media type its headers ask for, "" where they ask for none of ours.

    Raises InvalidRequest for a head that the layer does not have, NotAcceptable, and TooLarge.
    """
    asked, num_heads = request.figure, layer.spec.num_heads
    for i, head in enumerate(asked.heads or ()):
        if head >= num_heads:
            raise InvalidRequest.where(f"/figure/heads/{i}", f'a head below {num_heads} for layer "{request.layer}"', str(head))
    many = len(asked.heads or range(num_heads))
    if many > HEADS and asked.kind in ("heads", "similarity"):
        raise TooLarge.where("/figure/heads", f"at most {HEADS} heads in one picture", str(many))
    form = asked.format or PICTURES.get(accepted)
    if form is None:
        raise NotAcceptable.where("", f"an Accept that admits {' or '.join(PICTURES)}, or a figure.format", "neither")
    spec = _spec(request, num_heads, form)
    outputs = ["concatenated", "output"][: 1 + layer.spec.projections] if asked.kind == "concatenation" else []
    shown = request.model_copy(update={"outputs": outputs, "select": None, "output_gradient": None, "reproducible": True})
    cost = predict(shown, layer.spec)
    check(cost, limits)
    reduction = reduction_for(spec)
    call = replace(bind(shown, layer.spec), reduction=reduction, heads=spec.heads if reduction else None)
    return Sketch(Bound(shown, layer, call, cost), spec)


def _spec(request: FigureRequest, num_heads: int, form: Format) -> FigureSpec:
    asked = request.figure
    key = request.query if request.key is None else request.key
    heads = asked.heads or ([0] if asked.kind == "head" else range(num_heads))
    return FigureSpec(
        kind=asked.kind,
        item=asked.item,
        queries=request.query.shape[-2],
        keys=key.shape[-2],
        heads=tuple(heads),
        query_labels=request.words("query"),
        key_labels=request.words("key"),
        pool=asked.pool or "mean",
        title=asked.title,
        maximum=asked.maximum,
        logarithmic=asked.scale == "log",
        theme=asked.theme,
        colours=asked.colours,
        width=asked.width,
        dpi=asked.dpi,
        values=asked.values,
        format=form,
    )
