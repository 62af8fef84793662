"""POST /attend/figure: what it asks of a request and its layer, and the drawing of its result in one thread.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from attend.attention.call import Call, Result
from attend.attention.operations import FORWARD, Operation
from attend.errors import CallerGone, DeadlinePassed, InvalidRequest, NotAcceptable, TooLarge
from attend.heads.figures import FigureSpec, compose, draw, operation_for
from attend.serving.analysis import counted_queries
from attend.serving.cost import Cost
from attend.serving.fair_share import FairShare
from attend.serving.layer_checks import refuse_packed
from attend.serving.layers.registry import LoadedLayer
from attend.serving.prepared import Prepared
from attend.serving.request_type import RequestType
from attend.serving.requests import Request
from attend.serving.threads import lower_priority
from attend.spec import LayerSpec
from attend.wire.codec import Decoded, Encoded
from attend.wire.compression import compress
from attend.wire.negotiation import PICTURES
from attend.wire.schemas.attend import Past
from attend.wire.schemas.figure import FigureRequest

SIDES: tuple[Literal["query"], Literal["key"]] = ("query", "key")
PLOT_MODULE = "attend.heads.figures.plot"
T = TypeVar("T")
NEVER = 1 << 30  # collections of younger objects until a full one
THRESHOLDS = gc.get_threshold()  # of the process; every picture restores these, since one that is left behind may end after the next
MAX_HEADS = 256  # most heads in one picture
MAX_SECONDS = 30.0  # most seconds for waiting and drawing, if the caller sets no earlier deadline
MAX_WAITING = 32  # most drawings that are waiting or being drawn; each is bounded in cells and pixels, so their number bounds their cost


class FigureRequestType(RequestType[FigureRequest]):
    """A picture of the weights of heads, or of their outputs."""

    is_kept = in_shards = False
    draws = True

    def validated(self, decoded: Decoded, spec: LayerSpec, past: Past | None = None) -> FigureRequest:
        """The request with the format of the picture, and the outputs that it shows. Raises InvalidRequest or NotAcceptable."""
        request = super().validated(decoded, spec, past)
        format = request.figure.format or PICTURES.get(decoded.reply_format.get("picture_type", ""))
        if format is None:
            raise NotAcceptable.where("", f"an Accept with {' or '.join(PICTURES)}, or a figure.format", "neither")
        outputs = ["concatenated", "output"][: 1 + spec.projections] if request.figure.kind == "concatenation" else []
        figure = request.figure.model_copy(update={"format": format})
        # reproducible: equal requests get equal bytes
        changes = {"figure": figure, "outputs": outputs, "select": None, "output_gradient": None, "reproducible": True}
        return request.model_copy(update=changes)

    def check(self, request: FigureRequest, spec: LayerSpec) -> None:
        """Raises InvalidRequest or TooLarge also for heads that the layer or a picture does not have."""
        super().check(request, spec)
        refuse_packed(request)
        options, num_heads = request.figure, spec.num_heads
        for i, head in enumerate(options.heads or ()):
            if head >= num_heads:
                raise InvalidRequest.where(f"/figure/heads/{i}", f'a head below {num_heads} for layer "{request.layer}"', str(head))
        if request.has_signed_weights(spec):
            for field, value, other, allowed in (("pool", options.pool, "max", "mean"), ("scale", options.scale, "log", "linear")):
                if value == other:
                    expected = f'{allowed} for layer "{request.layer}", where weights may be negative'
                    raise InvalidRequest.where(f"/figure/{field}", expected, other)
        num_drawn = len(options.heads or range(num_heads))
        if num_drawn > MAX_HEADS and options.kind in ("heads", "similarity"):
            raise TooLarge.where("/figure/heads", f"at most {MAX_HEADS} heads in one picture", str(num_drawn))

    def predict(self, request: FigureRequest, spec: LayerSpec) -> Cost:
        """The cost of the call. Its reply is a picture, which is bounded in cells and pixels."""
        return replace(super().predict(request, spec), reply_bytes=0, tensor_bytes=0)

    def operation(self, request: FigureRequest, layer: LoadedLayer, call: Call) -> Operation:
        """The reduction of the weights to what is drawn; the forward pass if outputs are drawn."""
        return operation_for(figure_spec(request, layer.spec), counted_queries(request, call)) or FORWARD

    def describe(self, request: FigureRequest, spec: LayerSpec) -> dict[str, Any]:
        return {"figure": request.figure.kind, "format": request.figure.format}

    def encode(
        self, prepared: Prepared, result: Result, decoded: Decoded, request: Request, check: Callable[[], None] = lambda: None
    ) -> Encoded:
        """The picture. Raises what `check` raises."""
        spec = figure_spec(prepared.fields, prepared.layer.spec)
        metadata = {"Source": f"layer {prepared.layer.name}", "Fingerprint": prepared.layer.fingerprint}
        picture = draw(compose(spec, result.tensors, metadata), spec, check)
        media_type = next(media for media, format in PICTURES.items() if format == spec.format)
        reply: Encoded = ((b"content-type", media_type.encode()),), [picture]
        if not request.reply_coding or spec.format == "png":  # PNG is compressed already
            return reply
        return compress(reply, request.reply_coding)


FIGURE = FigureRequestType(FigureRequest)  # POST /attend/figure


def figure_spec(request: FigureRequest, layer_spec: LayerSpec) -> FigureSpec:
    """The picture of a request that `FigureRequestType` has validated."""
    options = request.figure
    assert options.format is not None
    heads = options.heads or ([0] if options.kind == "head" else range(layer_spec.num_heads))
    kept, tokens = {side: request.drawn_positions(side) for side in SIDES}, {side: request.item_tokens(side) for side in SIDES}
    labels = {side: tokens[side] if (at := kept[side]) is None else tuple(tokens[side][i] for i in at) for side in SIDES}
    return FigureSpec(
        kind=options.kind,
        item=options.item,
        queries=len(labels["query"]) or request.query.shape[-2],
        keys=len(labels["key"]) or request.num_keys,
        heads=tuple(heads),
        query_labels=labels["query"],
        key_labels=labels["key"],
        query_positions=kept["query"],
        key_positions=kept["key"],
        omitted=tuple(sorted({*tokens["query"], *tokens["key"]} - {*labels["query"], *labels["key"]})),
        pool=options.pool or "mean",
        signed=request.has_signed_weights(layer_spec),
        title=options.title,
        maximum=options.maximum,
        logarithmic=options.scale == "log",
        scale_per_head=options.scale_per_head,
        theme=options.theme,
        colours=options.colours,
        width=options.width,
        dpi=options.dpi,
        values=options.values,
        format=options.format,
    )


class FigureRenderer:
    """Draws one figure at a time in a separate thread, since matplotlib's settings and fonts are global to the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._thread = ThreadPoolExecutor(1, "drawing", _start)  # starts with the first figure
        self.waiting = FairShare[str](MAX_WAITING, times=1, least=1)  # number of drawings of each caller
        self._seconds = 0.5  # moving average of the seconds per figure

    async def draw(self, drawing: Callable[[Callable[[], None]], T], request: Request) -> T:
        """Run `drawing` in the thread and return its result; it calls its argument at intervals.

        Raises Overloaded, DeadlinePassed, CallerGone, and what `drawing` raises.
        """
        deadline = self.clock() + MAX_SECONDS
        if request.deadline is not None:
            deadline = min(deadline, request.deadline)
        with self.waiting.slot(request.caller, "pictures", math.ceil((1 + self.waiting.used) * self._seconds)):
            try:
                # no variable has the future, as one of asyncio.wait_for does: its error refers to this frame, and would keep the result
                async with asyncio.timeout(deadline - self.clock()):
                    return await asyncio.get_running_loop().run_in_executor(self._thread, self._draw, drawing, deadline, request.gone)
            except TimeoutError:
                raise _too_late() from None

    def _draw(self, drawing: Callable[[Callable[[], None]], T], deadline: float, gone: Callable[[], bool]) -> T:
        started = self.clock()

        def check() -> None:
            if self.clock() > deadline:
                raise _too_late()
            if gone():
                raise CallerGone

        with no_full_collection():
            drawn = drawing(check)
        self._seconds += 0.2 * (self.clock() - started - self._seconds)
        return drawn

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _start() -> None:
    """Begin the thread that draws. It gives way once matplotlib is imported: on a busy machine the first picture would wait too long."""
    _load_matplotlib()
    lower_priority()


def _load_matplotlib() -> None:
    """Import matplotlib. Later garbage collections leave its objects out."""
    if PLOT_MODULE not in sys.modules:
        with no_full_collection():
            importlib.import_module(PLOT_MODULE)
            gc.freeze()


@contextmanager
def no_full_collection() -> Iterator[None]:
    """Collect only the garbage among young objects during the `with` block.

    matplotlib makes hundreds of thousands of objects for a large figure, and a full collection among them would pause all threads for
    tenths of a second. `Plot.free` frees nearly all of them without a collection.
    """
    gc.set_threshold(*THRESHOLDS[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*THRESHOLDS)


def _too_late() -> DeadlinePassed:
    return DeadlinePassed("the deadline passed before the picture was drawn")
