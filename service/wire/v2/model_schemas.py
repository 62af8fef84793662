"""The documents of the Open Inference Protocol about the server and its models, as pydantic models; those of the repository, too."""

from typing import Any

from pydantic import BaseModel, Field

from service.wire.v2.schemas import StrictModel


class Health(BaseModel):
    live: bool
    ready: bool
    error: str | None = Field(default=None, description="Why it is not ready.")


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str] = Field(description="Extensions that this server supports.")


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1: any length.")


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(BaseModel):
    name: str
    ready: bool


class ConfigTensor(BaseModel):
    name: str
    data_type: str
    dims: list[int] = Field(description="Without the batch axis.")
    optional: bool | None = None


class ModelConfig(BaseModel):
    """The fields of Triton's model configuration that mean something here. `output` has the default outputs."""

    name: str
    platform: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[ConfigTensor]
    output: list[ConfigTensor]
    dynamic_batching: dict[str, Any] | None = None
    sequence_batching: dict[str, Any] | None = Field(
        default=None, description="In place of `dynamic_batching` if the server keeps sessions."
    )
    model_transaction_policy: dict[str, bool]


class Duration(BaseModel):
    count: int
    ns: int


class BatchStatistics(BaseModel):
    """Durations of the executed batches of this size; `compute_infer` counts a batch once."""

    batch_size: int = Field(description="Batch items computed together, of all calls that were stacked.")
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class MemoryUsage(BaseModel):
    type: str
    id: int
    byte_size: int


class ModelStatistics(BaseModel):
    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970.")
    inference_count: int = Field(description="Batch items of the calls that were answered.")
    execution_count: int = Field(description="Batches computed.")
    inference_stats: dict[str, Duration] = Field(
        description="compute_input is decoding, compute_infer computing, compute_output encoding; nothing is cached."
    )
    response_stats: dict[str, Any]
    batch_stats: list[BatchStatistics]
    memory_usage: list[MemoryUsage]


class Statistics(BaseModel):
    model_stats: list[ModelStatistics]


class RepositoryModel(BaseModel):
    name: str
    version: str
    state: str
    reason: str


class LoadParameters(StrictModel):
    config: str | None = Field(
        default=None,
        description="A LayerSpec as JSON text; without it, the unloaded layer is loaded.",
        json_schema_extra={"contentMediaType": "application/json"},
    )


class LoadRequest(StrictModel):
    parameters: LoadParameters | None = None


class UnloadParameters(StrictModel):
    unload_dependents: Any = Field(default=None, description="Nothing depends on a layer.")


class UnloadRequest(StrictModel):
    parameters: UnloadParameters | None = None


class IndexRequest(StrictModel):
    ready: bool = Field(default=False, description="List only ready models.")
