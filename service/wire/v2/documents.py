"""The JSON documents of the Open Inference Protocol, as pydantic models: what the routes answer, and the source of the OpenAPI document.

A request for inference is read by `exchange.py`, without any of these; its model here describes it to people and generators.
"""

from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

Parameters = dict[str, str | float | bool]


class V2Error(BaseModel):
    """Every refusal under /v2."""

    error: str


class Health(BaseModel):
    live: bool
    ready: bool
    error: str | None = Field(default=None, description="Why it is not ready.")


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str] = Field(description="Exactly those that work here.")


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 for what varies.")


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
    """The fields of Triton's model configuration that mean something here. `output` are those that come unless others are asked for."""

    name: str
    platform: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[ConfigTensor]
    output: list[ConfigTensor]
    dynamic_batching: dict[str, Any]
    model_transaction_policy: dict[str, bool]


class Duration(BaseModel):
    count: int
    ns: int


class BatchStatistics(BaseModel):
    """Executions of one batch size, counted by execution: `compute_infer` counts once what stacked calls were computed in."""

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


class InferenceInput(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = Field(default=None, description="`binary_data_size`: bytes of this tensor after the JSON.")
    data: list[Any] | None = Field(default=None, description="Row-major numbers, flat or nested to the shape.")


class InferenceOutput(BaseModel):
    name: str
    parameters: Parameters | None = Field(default=None, description="`binary_data`: as bytes after the JSON.")


class InferenceRequest(BaseModel):
    """Inputs are the tensors of AttendRequest; parameters its other fields, nested ones as JSON text, and `timeout` in microseconds."""

    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[InferenceInput]
    outputs: list[InferenceOutput] | None = Field(default=None, description="output and attention_weights if left out.")


class InferenceReply(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: Parameters = Field(description="fully_masked_rows, fingerprint")
    outputs: list[InferenceInput]


class LoadRequest(BaseModel):
    """`parameters.config` is a LayerSpec as JSON text; without it a layer that is held stays as it is."""

    parameters: dict[str, str] | None = None


def protocol_schemas() -> dict[str, Any]:
    """Name -> JSON schema of the documents that routes under /v2 read or write themselves."""
    models: list[Any] = [(model, "validation") for model in (InferenceRequest, InferenceReply, LoadRequest, V2Error)]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    return dict(definitions["$defs"])
