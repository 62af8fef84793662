"""POST /attend/figure: binds the request to a layer, and draws the result in one thread.

The weights are reduced to the cells of the picture block by block as they are computed, so a figure needs no more memory than a call
without weights, at any length.

A thread cannot be cancelled, so the drawing itself checks its deadline at intervals. The caller gets its error at the deadline.
"""

import asyncio
import gc
import importlib
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from attend.attention.call import Result
from attend.attention.operations import FORWARD
from attend.errors import CallerGone, DeadlinePassed, InvalidRequest, NotAcceptable, Overloaded, Problem, TooLarge
from attend.heads.figures import FigureSpec, Format, compose, draw, operation_for
from attend.serving.admission import Admission
from attend.serving.binding import check_against_layer, refuse_packed, shape_fields
from attend.serving.calls import make_call
from attend.serving.cost import predict
from attend.serving.layers.registry import LoadedLayer
from attend.serving.replies import refuse_fully_masked
from attend.serving.requests import BoundCall, RawRequest
from attend.serving.threads import lower_priority
from attend.spec import LayerSpec
from attend.wire.codec import Decoded, Encoded
from attend.wire.negotiation import PICTURES
from attend.wire.problems import validate
from attend.wire.schemas.figure import FigureRequest

SIDES: tuple[Literal["query"], Literal["key"]] = ("query", "key")
PLOT_MODULE = "attend.heads.figures.plot"
Check = Callable[[], None]  # raises if the caller no longer waits
Drawing = Callable[[Check], bytes]  # draws a picture, and calls the check at intervals
MAX_HEADS = 256  # most heads in one picture
MAX_SECONDS = 30.0  # most seconds for waiting and drawing, if the caller sets no earlier deadline
MAX_WAITING = 32  # most waiting drawings; each is bounded in cells and pixels, so their number bounds their cost


def bind_figure(decoded: Decoded, layer: LoadedLayer, admission: Admission) -> BoundCall:
    """The bound call of a request for a figure.

    Raises InvalidRequest, NotAcceptable, or TooLarge for a cost beyond the limits.
    """
    request = validate(FigureRequest, decoded.members)
    check_against_layer(request, layer.spec)
    options, num_heads = request.figure, layer.spec.num_heads
    for i, head in enumerate(options.heads or ()):
        if head >= num_heads:
            raise InvalidRequest.where(f"/figure/heads/{i}", f'a head below {num_heads} for layer "{request.layer}"', str(head))
    if layer.spec.signed_weights:
        for field, value, other in (("pool", options.pool, "max"), ("scale", options.scale, "log")):
            if value == other:
                raise InvalidRequest.where(f"/figure/{field}", f'another for layer "{request.layer}", whose weights may be negative', other)
    num_drawn = len(options.heads or range(num_heads))
    if num_drawn > MAX_HEADS and options.kind in ("heads", "similarity"):
        raise TooLarge.where("/figure/heads", f"at most {MAX_HEADS} heads in one picture", str(num_drawn))
    format = options.format or PICTURES.get(decoded.picture_type)
    if format is None:
        raise NotAcceptable.where("", f"an Accept with {' or '.join(PICTURES)}, or a figure.format", "neither")
    spec = _figure_spec(request, layer.spec, format)
    outputs = ["concatenated", "output"][: 1 + layer.spec.projections] if options.kind == "concatenation" else []
    # reproducible: equal requests get equal bytes
    request = request.model_copy(update={"outputs": outputs, "select": None, "output_gradient": None, "reproducible": True})
    refuse_packed(request)
    cost = predict(request, layer.spec)
    admission.require(request, layer.spec, cost)
    operation = operation_for(spec)
    call = make_call(request, layer.spec).with_options(heads=spec.heads if operation else None)
    log_fields = {**shape_fields(request, call), "figure": spec.kind, "format": spec.format}
    return BoundCall(request, layer, call, cost, log_fields, operation=operation or FORWARD, figure=spec)


def _figure_spec(request: FigureRequest, layer: LayerSpec, format: Format) -> FigureSpec:
    options = request.figure
    key = request.query if request.key is None else request.key
    heads = options.heads or ([0] if options.kind == "head" else range(layer.num_heads))
    kept, tokens = {side: request.drawn_positions(side) for side in SIDES}, {side: request.item_tokens(side) for side in SIDES}
    labels = {side: tokens[side] if (at := kept[side]) is None else tuple(tokens[side][i] for i in at) for side in SIDES}
    return FigureSpec(
        kind=options.kind,
        item=options.item,
        queries=len(labels["query"]) or request.query.shape[-2],
        keys=len(labels["key"]) or key.shape[-2],
        heads=tuple(heads),
        query_labels=labels["query"],
        key_labels=labels["key"],
        query_positions=kept["query"],
        key_positions=kept["key"],
        omitted=tuple(sorted({*tokens["query"], *tokens["key"]} - {*labels["query"], *labels["key"]})),
        pool=options.pool or "mean",
        signed=layer.signed_weights,
        title=options.title,
        maximum=options.maximum,
        logarithmic=options.scale == "log",
        theme=options.theme,
        colours=options.colours,
        width=options.width,
        dpi=options.dpi,
        values=options.values,
        format=format,
    )


class FigureRenderer:
    """Draws one figure at a time in a separate thread, since matplotlib's settings and fonts are global to the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._thread = ThreadPoolExecutor(1, "drawing", _start)  # starts with the first figure
        self.waiting = 0  # number of drawings that are waiting or being drawn
        self._seconds = 0.5  # moving average of the seconds per figure

    async def reply(self, bound: BoundCall, result: Result, raw: RawRequest) -> Encoded:
        """The reply with the figure of a bound call. Raises what `draw` and `refuse_fully_masked` raise."""
        refuse_fully_masked(bound, result)
        spec = bound.figure
        assert spec is not None
        metadata = {"Source": f"layer {bound.layer.name}", "Fingerprint": bound.layer.fingerprint}
        picture = await self.draw(lambda check: draw(compose(spec, result.tensors, metadata), spec, check), raw)
        media_type = next(media for media, format in PICTURES.items() if format == spec.format)
        return Encoded(((b"content-type", media_type.encode()),), [picture])

    async def draw(self, drawing: Drawing, raw: RawRequest) -> bytes:
        """Run `drawing` in the thread and return its bytes. Raises Overloaded, DeadlinePassed, CallerGone, and what `drawing` raises."""
        if self.waiting >= MAX_WAITING:
            expected = f"at most {MAX_WAITING} pictures that wait to be drawn"
            raise Overloaded(math.ceil(self.waiting * self._seconds), problems=[Problem("", expected, str(self.waiting + 1))])
        deadline = self.clock() + MAX_SECONDS
        if raw.deadline is not None:
            deadline = min(deadline, raw.deadline)
        self.waiting += 1
        try:
            # No variable has the future, as one of asyncio.wait_for does: its error refers to this frame; the cycle would keep the result.
            async with asyncio.timeout(deadline - self.clock()):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._draw, drawing, deadline, raw.gone)
        except TimeoutError:
            raise _too_late() from None
        finally:
            self.waiting -= 1

    def _draw(self, drawing: Drawing, deadline: float, gone: Callable[[], bool]) -> bytes:
        started = self.clock()

        def check() -> None:
            if self.clock() > deadline:
                raise _too_late()
            if gone():
                raise CallerGone

        drawn = drawing(check)
        self._seconds += 0.2 * (self.clock() - started - self._seconds)
        return drawn

    def close(self) -> None:
        self._thread.shutdown()


def _start() -> None:
    """Begin the thread that draws. It gives way once matplotlib is imported: on a busy machine the first picture would wait too long."""
    _load_matplotlib()
    lower_priority()


def _load_matplotlib() -> None:
    """Import matplotlib. A full garbage collection among its many objects would pause all threads for a tenth of a second, so there is none
    during the import, and later ones leave these objects out."""
    if PLOT_MODULE in sys.modules:
        return
    gc.disable()
    try:
        importlib.import_module(PLOT_MODULE)
        gc.freeze()
    finally:
        gc.enable()


def _too_late() -> DeadlinePassed:
    return DeadlinePassed("the deadline passed before the picture was drawn")
