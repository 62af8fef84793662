"""`Prepared`: a request that has nothing left to refuse, as a `RequestType` makes it, the scheduler computes it, and a cache keeps it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attend.attention.call import Call
from attend.attention.masks import MASK_TENSORS
from attend.attention.operations import FORWARD, Operation
from attend.axes import INPUTS
from attend.serving.calls import call_tensors, given_arrays, input_tensors
from attend.serving.cost import Cost
from attend.serving.layers.registry import LoadedLayer
from attend.serving.sessions.session import Session
from attend.tensors import shape_alone
from attend.wire.arrays import MAX_EXACT_INTEGER
from attend.wire.schemas.attend import AttendRequest

NO_NUMBERS = torch.empty(0)
MAX_KEPT_QUERIES = 4096  # of a request that is kept: positions of more would take memory, and to prepare it is quick beside such a call


class Prepared(NamedTuple):
    """A request that has nothing left to refuse, and how it is computed and answered: its shapes fit the layer, its cost is admitted, its
    arrays are cast to the layer's dtype. One that a cache keeps (`without_numbers`) is the same for all requests of its shape."""

    layer: LoadedLayer
    call: Any  # a `Call`; None if the operation needs none
    cost: Cost
    operation: Operation = FORWARD
    fields: Any = None  # those of the body, validated by the schema of its type; None if nothing is encoded by them
    in_parts: bool = False  # too large for one process: cut along its keys and computed by the shards
    log_fields: Mapping[str, Any] = {}  # of the request's log line
    session: Session | None = None  # to which the call appends rows
    batch_key: tuple[Any, ...] | None = None  # calls with equal keys may share a batch; None: the call runs alone
    tensors: tuple[str, ...] = ()  # without numbers: the fields that have tensors, beside query, key and value

    def without_numbers(self) -> "Prepared | None":
        """What requests with the same cache key have in common; None if it depends on numbers, or takes much memory."""
        fields, call = self.fields, self.call
        arrays = given_arrays(fields)
        others = tuple(name for name in arrays if name not in INPUTS)
        depends_on_numbers = others and fields.query_offset == "end"  # the offset is that of the last key that is not masked
        if call.masks.positions.shape[1] > MAX_KEPT_QUERIES or depends_on_numbers:
            return None
        shapes = {name: shape_alone(array.shape, array.dtype) for name, array in arrays.items()}
        no_masks: dict[str, Any] = dict.fromkeys(name for name in MASK_TENSORS if name != "positions") | {"bias_blocks": False}
        call = Call(call.options, NO_NUMBERS, NO_NUMBERS, NO_NUMBERS, call.masks._replace(**no_masks))
        kept: dict[str, Any] = {"layer": None, "call": call, "fields": fields.model_copy(update=shapes)}  # the layer has the cache
        return self._replace(**kept, tensors=others)

    def with_numbers(self, members: Mapping[str, Any], layer: LoadedLayer) -> "Prepared | None":
        """The prepared request with these members, whose cache key is that of `self`. None if an element of a mask is wrong: to validate
        the request says which one.

        Raises InvalidRequest if a number is not finite in the layer's dtype.
        """
        options, masks, arrays = self.call.options, self.call.masks, {}
        for name in self.tensors:
            most = options.num_keys if name == "valid_lens" else MAX_EXACT_INTEGER - 1
            if (array := AttendRequest.tensors[name].valid(members[name], most)) is None:
                return None
            arrays[name] = array
        inputs = input_tensors(members["query"], members.get("key"), members.get("value"), layer.spec, options.reproducible)
        others: dict[str, Any] = {}
        if arrays:
            others, of_masks = call_tensors(arrays, members["query"].ndim == 3, layer.spec, options.reproducible)
            masks = masks._replace(**of_masks)
        call = Call(options, *inputs, masks, others)
        return Prepared(layer, call, self.cost, self.operation, self.fields, self.in_parts, self.log_fields)
