"""The requests and replies of the Open Inference Protocol as pydantic models: inference, the server and its models, and the repository."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, WithJsonSchema

from attend.errors import InvalidRequest
from attend.spec_parts import WHOLE, field_error, whole
from attend.tensors import DATATYPES
from attend.wire.arrays import MAX_RANK
from attend.wire.codec import SequencePart
from attend.wire.problems import HALF_SURROGATE, describe_value, is_unicode
from attend.wire.schemas.attend import AttendRequest
from attend.wire.schemas.schema import without_default
from attend.wire.schemas.tensors import MAX_AXIS, REFERENCE
from attend.wire.v2.members import INPUT_NAMES, JSON_TEXT_FIELDS, PARAMETER_FIELDS

MAX_INPUTS = 64  # of one request; there are fewer names of inputs
Parameters = dict[str, str | float | bool]


class V2Error(BaseModel):
    """Every refusal under /v2."""

    error: str


class StrictModel(BaseModel):
    """Unknown members are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CodecParameters(StrictModel):
    content_type: Any = Field(default=None, description="Ignored: sent by MLServer's codecs.")


class InputParameters(CodecParameters):
    binary_data_size: Annotated[int, Field(ge=0), WHOLE] | None = Field(default=None, description="Bytes of this tensor after the JSON.")


class OutputParameters(CodecParameters):
    binary_data: bool = Field(default=False, description="As bytes after the JSON; `binary_data_output` if left out.")


def _valid_microseconds(value: Any) -> Any:
    value = whole(value)
    if type(value) is not int or not 0 <= value < 2**64:
        raise field_error("", f"a whole number of microseconds from 0 to {2**64 - 1}", describe_value(value))
    return value


Microseconds = Annotated[int, Field(ge=0, lt=2**64), BeforeValidator(_valid_microseconds)]


def _valid_unicode(text: str) -> str:
    if not is_unicode(text):  # the reply repeats it
        raise field_error("", "a string of Unicode text", HALF_SURROGATE)
    return text


def _add_parameter_fields(schema: dict[str, Any]) -> None:
    """Adds the fields of AttendRequest to the parameters' JSON schema. They are validated with the request's other members."""
    schema["additionalProperties"] = False
    fields = AttendRequest.model_json_schema(ref_template=REFERENCE)["properties"]
    text = {"type": "string", "contentMediaType": "application/json"}
    for name in sorted(PARAMETER_FIELDS):
        field = {key: value for key, value in fields[name].items() if key not in ("title", "default", "anyOf", "$ref")}
        schemas = [one for one in fields[name].get("anyOf", [fields[name]]) if one.get("type") not in ("null", "array")]
        shape = {"anyOf": schemas} if len(schemas) > 1 else {key: schemas[0][key] for key in schemas[0] if key not in ("title", "default")}
        schema["properties"][name] = {**(text if name in JSON_TEXT_FIELDS else shape), **field}


def _valid_sequence_id(value: Any) -> Any:
    value = whole(value)
    is_number = type(value) is int and 0 <= value < 2**64
    if not is_number and not (isinstance(value, str) and len(value) <= 128 and is_unicode(value)):
        raise field_error("", "an integer of 64 bits, at least 0, or a text of at most 128 characters", describe_value(value))
    return value


class InferenceParameters(CodecParameters):
    """Those of the protocol, and the fields of AttendRequest that are no tensors; those with members of their own as JSON text."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_add_parameter_fields)

    binary_data_output: bool = Field(default=False, description="Outputs as bytes after the JSON.")
    priority: Annotated[int, Field(ge=0, lt=2**64), WHOLE] = Field(default=0, description="Has no effect.")
    timeout: Microseconds = Field(default=0, description="Microseconds; 0 is no timeout of the request's own.")
    triton_enable_empty_final_response: bool = Field(default=False, description="For streams over gRPC.")
    sequence_id: Annotated[int | str, BeforeValidator(_valid_sequence_id)] = Field(
        default=0,
        description="The sequence whose keys and values the server keeps; 0, empty or left out: none.",
        json_schema_extra=without_default,  # Go clients that are generated from a union with a default do not compile
    )
    sequence_start: bool = Field(default=False, description="Whether the request begins the sequence.")
    sequence_end: bool = Field(default=False, description="Whether the sequence ends after the request.")

    @property
    def seconds(self) -> float | None:
        """The timeout in seconds; None if there is none."""
        return self.timeout / 1e6 or None

    @property
    def sequence(self) -> SequencePart | None:
        """The sequence of the request; None if it belongs to none. Raises InvalidRequest for a beginning or an end of none."""
        if self.sequence_id in (0, ""):
            for name in ("sequence_start", "sequence_end"):
                if getattr(self, name):
                    raise InvalidRequest.where(f"/parameters/{name}", "a sequence_id in addition", name)
            return None
        return SequencePart(str(self.sequence_id), self.sequence_start, self.sequence_end)


class InferenceInput(StrictModel):  # codec.py validates name, shape, datatype and data; members.py the names of outputs
    name: Annotated[str, WithJsonSchema({"type": "string", "enum": INPUT_NAMES})]
    shape: SkipValidation[Annotated[list[Annotated[int, Field(ge=0, le=MAX_AXIS)]], Field(max_length=MAX_RANK)]]
    datatype: SkipValidation[Literal[tuple(DATATYPES)]]  # type: ignore[valid-type]  # the names are in a table
    parameters: InputParameters | None = None
    data: SkipValidation[Any] = Field(
        default=None,
        description="Row-major numbers, flat or nested to the shape; or as bytes.",
        json_schema_extra={"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]},
    )


class InferenceOutput(StrictModel):
    name: str = Field(description="An output in the metadata of the model, a gradient, or attention_weights.keys or .values with top_k.")
    parameters: OutputParameters | None = None


class InferenceRequest(StrictModel):
    """Inputs are the tensors of AttendRequest; parameters its other fields, nested ones as JSON text, and `timeout` in microseconds."""

    model_name: str | None = Field(default=None, description="As in the path.")
    model_version: str | None = Field(default=None, description="1")
    id: Annotated[str, AfterValidator(_valid_unicode)] | None = None
    parameters: InferenceParameters | None = None
    inputs: list[InferenceInput] = Field(min_length=1, max_length=MAX_INPUTS)
    outputs: list[InferenceOutput] | None = Field(default=None, description="output and attention_weights if left out.")


class ReplyOutput(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = Field(default=None, description="`binary_data_size`: bytes of this tensor after the JSON.")
    data: list[Any] | None = Field(default=None, description="Row-major numbers, flat.")


class InferenceReply(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: Parameters = Field(description="fully_masked_rows, fingerprint")
    outputs: list[ReplyOutput]


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
