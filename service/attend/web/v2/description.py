"""Describes a layer as a model of the Open Inference Protocol: metadata, configuration, statistics. Used for HTTP and gRPC.

In shapes, b is batch, q queries, k keys, h heads. Every input may have a batch axis in front, so a layer is a batching model:
`max_batch_size` is above 0, and `dims` in the configuration are the metadata's `shape` without its first axis. Triton and its clients have
no tensors with only the batch axis, so one number per item is announced as [b, 1]. Requests may use other shapes, too. Tensors that need
a parameter or no batch (gradients, the largest weights, several sequences in one query) are not announced.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attend.axes import TENSOR_FIELDS, Kind
from attend.serving.admission import largest_batch
from attend.serving.cost import wire_datatype
from attend.serving.layers.registry import LoadedLayer, UnloadedLayer, by_name
from attend.serving.service import Service
from attend.serving.sessions.registry import MAX_SESSIONS
from attend.serving.statistics import FAILED, Totals, answered
from attend.spec import LayerSpec
from attend.tensors import BY_TORCH
from attend.version import __version__
from attend.wire.safetensors import LIST_FIELDS
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.sessions import PostSession
from attend.wire.v2.members import DEFAULT_OUTPUTS, PER_ITEM_FIELDS, VERSION
from attend.wire.v2.schemas import (
    BatchStatistics,
    ConfigTensor,
    Duration,
    MemoryUsage,
    ModelConfig,
    ModelMetadata,
    ModelStatistics,
    RepositoryModel,
    ServerMetadata,
    Statistics,
    TensorMetadata,
)

PLATFORM = "pytorch_attention"
UNCONDITIONAL_EXTENSIONS = ["binary_tensor_data", "parameters", "model_configuration", "schedule_policy"]
HEADER_BYTES = 1024  # bytes reserved for the JSON header of a request with few inputs
OF_KIND: dict[Kind, str] = {"mask": "BOOL", "count": "INT64", "segment": "INT64"}  # kind of a tensor -> datatype; others have the layer's
NEEDED = {"", *TENSOR_FIELDS}
ANNOUNCED = [name for name in AttendRequest.tensor_kinds if "b" in TENSOR_FIELDS[name] and TENSOR_FIELDS[name].needs in NEEDED]
# name in the protocol -> field of `Totals`
DURATIONS = {"success": "total", "queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "encode"}


@dataclass(frozen=True, slots=True)
class ProtocolExtensions:
    """The protocol extensions that the settings allow. `why_…`: makes the error to raise if an extension does not work, else None.

    A new error for each refusal: a kept one would collect, each time that it is raised, the frames that it passes and their requests.
    """

    why_not_writable: Callable[[], Exception] | None
    why_no_statistics: Callable[[], Exception] | None
    sessions: bool = False  # whether the server keeps sessions
    workers: int = 1  # processes; each has a copy of every layer

    def require_writable(self) -> None:
        if self.why_not_writable is not None:
            raise self.why_not_writable()

    def require_statistics(self) -> None:
        if self.why_no_statistics is not None:
            raise self.why_no_statistics()

    @property
    def extensions(self) -> list[str]:
        """The protocol's names of the extensions that work."""
        dependent = {"model_repository": self.why_not_writable, "statistics": self.why_no_statistics}
        sequence = ["sequence"] if self.sessions else []
        return [*UNCONDITIONAL_EXTENSIONS, *sequence, *(name for name, why_not in dependent.items() if why_not is None)]

    def metadata(self) -> ServerMetadata:
        return ServerMetadata(name="attend", version=__version__, extensions=self.extensions)


def index_of(layers: Sequence[LoadedLayer | UnloadedLayer], ready: bool) -> list[RepositoryModel]:
    """The model repository: loaded layers are READY, unloaded ones UNAVAILABLE. With `ready`, only the loaded ones. To be called in a
    thread, since a thousand layers take milliseconds."""
    wanted = [layer for layer in by_name(layers) if isinstance(layer, LoadedLayer) or not ready]
    states = [("READY", "") if isinstance(layer, LoadedLayer) else ("UNAVAILABLE", "unloaded") for layer in wanted]
    return [
        RepositoryModel(name=layer.name, version=VERSION, state=state, reason=reason)
        for layer, (state, reason) in zip(wanted, states, strict=True)
    ]


def metadata_of(layer: LoadedLayer) -> ModelMetadata:
    """The inputs and outputs of a model: names, datatypes, shapes."""
    spec = layer.spec
    return ModelMetadata(name=layer.name, versions=[VERSION], platform=PLATFORM, inputs=_inputs(spec), outputs=_outputs(spec))


def config_of(layer: LoadedLayer, service: Service, largest: int) -> ModelConfig:
    """The configuration, which Triton's clients read before they call. `max_batch_size`: items of one query and one key each that fit into
    a binary message of `largest` bytes and into the service's limits."""
    spec = layer.spec
    required = _required(spec)
    item = sum(math.prod(tensor.shape[2:]) for tensor in _inputs(spec) if tensor.name in required) * BY_TORCH[spec.dtype].size
    room = (largest - HEADER_BYTES) // item
    return ModelConfig(
        name=layer.name,
        platform=PLATFORM,
        version_policy={"specific": {"versions": [int(VERSION)]}},
        max_batch_size=max(1, min(room, largest_batch(spec, service.limits))),
        input=[_config(tensor, tensor.name not in required) for tensor in _inputs(spec)],
        output=[_config(tensor, None) for tensor in _outputs(spec) if tensor.name in DEFAULT_OUTPUTS],
        model_transaction_policy={"decoupled": False},
        **_scheduling(service),
    )


def _scheduling(service: Service) -> dict[str, Any]:
    """The scheduling section of Triton's configuration: `sequence_batching` if the server keeps sessions, else `dynamic_batching`."""
    delay = round(service.scheduler.limits.batch_delay * 1e6)
    if service.engine.sessions is None:
        return {"dynamic_batching": {"max_queue_delay_microseconds": delay, "default_queue_policy": {"allow_timeout_override": True}}}
    idle = round(PostSession().idle_seconds * 1e6)
    oldest = {"max_candidate_sequences": MAX_SESSIONS, "max_queue_delay_microseconds": delay}
    return {"sequence_batching": {"max_sequence_idle_microseconds": idle, "oldest": oldest}}


def statistics_of(service: Service, layers: Sequence[LoadedLayer], workers: int) -> Statistics:
    """Statistics of these models since the server started, over all workers, by name. To be called in a thread, as `index_of`."""
    counted = service.statistics.all()
    return Statistics(model_stats=[_statistics(layer, counted.get(layer.name, {}), workers) for layer in by_name(layers)])


def _statistics(layer: LoadedLayer, rows: Mapping[int, Totals], workers: int) -> ModelStatistics:
    """`rows`: by batch size."""
    spec, device, whole, failed = layer.spec, layer.attention.device, answered(rows), rows.get(FAILED, Totals())
    durations = {name: Duration(count=whole.calls, ns=getattr(whole, phase)) for name, phase in DURATIONS.items()}
    durations["fail"] = Duration(count=failed.calls, ns=failed.total)
    nothing = Duration(count=0, ns=0)
    size = spec.num_parameters * BY_TORCH[spec.dtype].size * workers
    return ModelStatistics(
        name=layer.name,
        version=VERSION,
        last_inference=whole.last,
        inference_count=whole.items,
        execution_count=whole.executions,
        inference_stats={**durations, "cache_hit": nothing, "cache_miss": nothing},
        response_stats={},
        batch_stats=[_batch(row) for size, row in rows.items() if size >= 0],
        memory_usage=[MemoryUsage(type="CPU" if device.type == "cpu" else "GPU", id=device.index or 0, byte_size=size)],
    )


def _batch(row: Totals) -> BatchStatistics:
    """Statistics of the batches of one size. Counts executions, not calls; decode and encode times are sums over the calls of a batch."""
    spent = {"compute_input": row.decode, "compute_infer": row.execution, "compute_output": row.encode}
    return BatchStatistics(batch_size=row.size, **{name: Duration(count=row.executions, ns=ns) for name, ns in spent.items()})


def _inputs(spec: LayerSpec) -> list[TensorMetadata]:
    """Every announced tensor with the axes that it has at most, and the fields that are lists of numbers."""
    lengths = {"h": spec.num_heads} | {name: getattr(spec, name) for name in ("query_dim", "key_dim", "value_dim", "value_head_dim")}
    inputs = []
    for name in ANNOUNCED:
        field = TENSOR_FIELDS[name]
        shape = [-1 if axis in field.broadcast else lengths.get(axis, -1) for axis in max(field.shapes, key=len)]
        datatype = OF_KIND.get(field.kind, BY_TORCH[spec.dtype].name)
        if "axes" in field:  # coordinates
            if spec.coordinates is None:
                continue
            shape, datatype = [-1, -1, *([spec.coordinates.axes] if spec.coordinates.axes > 1 else [])], "FP64"
        inputs.append(TensorMetadata(name=name, datatype=datatype, shape=[-1, 1] if name in PER_ITEM_FIELDS else shape))
    return inputs + [TensorMetadata(name=name, datatype="INT64", shape=[-1, 1]) for name in LIST_FIELDS]


def _required(spec: LayerSpec) -> set[str]:
    """The required inputs: the key defaults to the query, and the value to the key, if they have the same width."""
    if spec.value_dim != spec.key_dim:
        return {"query", "key", "value"}
    return {"query"} if spec.key_dim == spec.query_dim else {"query", "key"}


def _outputs(spec: LayerSpec) -> list[TensorMetadata]:
    """Every output of the layer but the gradients, in the datatype of a request that chooses none."""
    return [
        TensorMetadata(name=name, datatype=wire_datatype(name, None, spec), shape=list(spec.output_shape(name, -1, -1, -1)))
        for name in dict.fromkeys((*DEFAULT_OUTPUTS, *spec.outputs()))
    ]


def _config(tensor: TensorMetadata, optional: bool | None) -> ConfigTensor:
    return ConfigTensor(name=tensor.name, data_type=f"TYPE_{tensor.datatype}", dims=tensor.shape[1:], optional=optional)
