"""All settings of a server, read once and then frozen. Precedence: flags, environment variables (ATTEND_…), a TOML file, defaults.

Only `cli`, `deploy` and `web/app` import this; other packages get the values they need as arguments. Unknown names are refused.

pydantic-settings would read the variables and the file, but it ignores variables with the prefix that are no settings, and its errors do
not name the flag, variable or file of a value: both would remain here, beside a dependency whose import takes 0.1 s of a start.
"""

import ipaddress
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from attend.errors import RequestError, did_you_mean
from attend.limits import MIB, READY_SECONDS, BatchLimits, QueueLimits, ServingLimits, WireLimits
from attend.spec import DType, Init, LayerSpec, MatmulPrecision
from attend.wire.json.strict import parse_strictly
from attend.wire.schemas.schema import LAYER_NAME

PREFIX = "ATTEND_"
BODY, CALL, QUEUE = WireLimits(), ServingLimits(), QueueLimits()  # the defaults
CLIENT_VARIABLES = {"ATTEND_API_KEY", "ATTEND_CA"}  # for clients and commands with --url; not settings of a server
# Kubernetes sets variables in every pod of a namespace with a Service named attend; they are known by their names or by their values
KUBERNETES_NAME, KUBERNETES_VALUE = re.compile(r"ATTEND_(SERVICE|PORT)_"), re.compile(r"(tcp|udp|sctp)://")
COMMA_SEPARATED = r"^\s*(({})\s*(,\s*|$))*$"  # template of a pattern: items separated by commas
EXAMPLE = '{"small": {"d_model": 8, "num_heads": 2}}'
LAYER_FIELDS = ("d_model", "num_heads", "key_dim", "value_dim", "bias", "scale", "softcap", "seed", "init", "dtype", "matmul_precision")


class BadSettings(Exception):
    """A setting that does not exist or has no sensible value; the message names the setting and its source."""


class Settings(BaseModel):
    """All settings. The description of each field is its help text, on the command line and in docs/settings.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # where the server listens
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    uds: Path | None = Field(default=None, description="Unix socket to listen on, instead of host and port.")
    grpc_port: int | None = Field(default=None, ge=0, le=65535, description="Port of the gRPC server (extra `grpc`); no gRPC if not set.")
    root_path: str = Field(default="", pattern=r"^(/[^/?#]+)*$", description="Path prefix that a proxy removes, such as /attend.")

    # what computes
    device: str = Field(default="cpu", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="Device: cpu, cuda, cuda:1, … or auto.")
    threads: int | None = Field(default=None, ge=1, description="Threads per worker for arithmetic; if not set, its share of the cores.")
    workers: int = Field(default=1, ge=1, description="Processes that share the port. Each has all layers in memory.")

    # the layer `default`, and more layers
    d_model: int = Field(default=64, description="Width of the layer `default`.")
    num_heads: int = Field(default=8, description="Number of heads of the layer `default`.")
    key_dim: int | None = Field(default=None, description="Width of the keys of `default`; d_model if not set.")
    value_dim: int | None = Field(default=None, description="Width of the values of `default`; d_model if not set.")
    bias: bool | None = Field(default=None, description="Whether the projections of `default` have biases; depends on init if not set.")
    scale: float | None = Field(default=None, description="Scale of the scores of `default`; 1/sqrt(head_dim) if not set.")
    softcap: float | None = Field(default=None, description="Soft cap of the scores of `default`; none if not set.")
    seed: int = Field(default=0, description="Seed of the weights of `default`.")
    init: Init = Field(default="xavier_uniform", description="Initialization of the weights of `default`.")
    dtype: DType = Field(default="float32", description="Data type of the weights and arithmetic of `default`.")
    matmul_precision: MatmulPrecision = Field(
        default="highest", description="Precision of float32 products; high and medium allow TF32 on GPUs."
    )
    layers: dict[Annotated[str, Field(pattern=LAYER_NAME)], LayerSpec] = Field(
        default={}, description="More layers by name: tables [layers.NAME] in the file, JSON in a flag or variable."
    )
    layers_dir: Path | None = Field(
        default=None, description="Folder that stores layers added over HTTP; if not set, they are in memory only."
    )

    # limits of layers
    max_layer_bytes: int = Field(
        default=BODY.max_layer_bytes, ge=1024, description="Largest safetensors body or file of a layer, in bytes."
    )
    max_layer_parameters: int = Field(default=CALL.max_layer_parameters, ge=1, description="Parameters of the largest layer.")
    max_layer_width: int = Field(
        default=CALL.max_layer_width, ge=1, description="Largest width of a layer: of its inputs, projections and outputs."
    )
    max_total_parameters: int = Field(default=CALL.max_total_parameters, ge=1, description="Parameters of all layers together.")
    max_layers: int = Field(default=CALL.max_layers, ge=1, description="Number of layers, including `default`.")

    # limits of one request
    max_body_bytes: int = Field(default=BODY.max_body_bytes, ge=1024, description="Largest request body, in bytes.")
    max_grpc_bytes: int = Field(
        default=32 * MIB, ge=1024, le=2**31 - 1, description="Largest gRPC request or reply, in bytes; at most max_body_bytes."
    )
    max_resident_bytes: int | None = Field(
        default=None,
        ge=MIB,
        description="Resident memory at which a process with a gRPC port ends, and of which one call may need half; "
        "if not set, 90 % of its share of all.",
    )
    max_depth: int = Field(default=BODY.max_depth, ge=8, le=1000, description="Deepest nesting of JSON in a request.")
    max_tensors: int = Field(default=BODY.max_tensors, ge=16, description="Tensors in one body, and members of one JSON object.")
    max_batch_items: int = Field(default=CALL.max_batch_items, ge=1, description="Length of the batch axis of one call.")
    max_pairs: int = Field(default=CALL.max_pairs, ge=1, description="Heads x queries x keys of one batch item.")
    max_scores: int = Field(default=CALL.max_scores, ge=1, description="Numbers of attention weights and scores in one reply.")
    max_operations: int = Field(default=CALL.max_operations, ge=1, description="Predicted work of one call, in floating-point operations.")
    max_memory_bytes: int = Field(default=CALL.max_memory_bytes, ge=MIB, description="Predicted memory of one call, in bytes.")
    max_reply_bytes: int = Field(default=CALL.max_reply_bytes, ge=1024, description="Predicted size of one reply, in bytes.")
    request_timeout: float | None = Field(default=None, gt=0, description="Deadline in seconds for requests that set none.")

    # the queue, batches and sessions
    max_queue_operations: int = Field(
        default=QUEUE.max_queue_operations, ge=1, description="Predicted work of all waiting calls, in operations."
    )
    max_queue_bytes: int = Field(default=QUEUE.max_queue_bytes, ge=MIB, description="Predicted memory of all waiting calls, in bytes.")
    max_buffered_bytes: int | None = Field(
        default=None, ge=MIB, description="Bytes of all request bodies and replies in memory; max_queue_bytes if not set."
    )
    max_batch_calls: int = Field(
        default=BatchLimits().calls, ge=1, description="Calls in one batch, on a GPU. A CPU computes calls one by one."
    )
    batch_delay: float = Field(
        default=QUEUE.batch_delay, ge=0, le=10, description="Seconds an idle device waits for more calls; useful only on a GPU."
    )
    session_memory: int = Field(default=0, ge=0, description="Bytes of keys and values of sessions, with one worker; 0: no sessions.")
    replica_name: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_-]{0,62})?$",
        description="Name of this server in ids of sessions, for balancers: up to 63 letters, digits, - and _.",
    )

    # who may call
    keys_file: Path | None = Field(default=None, description="File of API keys (`attend keys add`); every route but health needs one.")
    allowed_hosts: str = Field(
        default="",
        pattern=COMMA_SEPARATED.format(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+"),
        description="Names allowed in Host without ports, with commas, or *; if not set, localhost on loopback without keys.",
    )
    cors_origins: str = Field(
        default="",
        pattern=COMMA_SEPARATED.format(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@,]+"),
        description="Origins of web pages that may call, such as https://a.example, separated by commas, or *; none if not set.",
    )
    tls_cert: Path | None = Field(default=None, description="Certificate chain (PEM); with --tls-key, the server uses TLS.")
    tls_key: Path | None = Field(default=None, description="Private key (PEM) of that certificate.")
    trusted_proxies: str = Field(
        default="", description="Proxies whose X-Forwarded-… are used: addresses or networks, separated by commas, or *."
    )

    # connections and replies
    client_timeout: float = Field(default=20.0, gt=0, description="Seconds in which the headers of a request must arrive.")
    min_client_rate: int = Field(default=32768, ge=1, description="Bytes per second at which bodies arrive and replies are read, at least.")
    keepalive_timeout: float = Field(default=75.0, gt=0, description="Seconds until an idle connection is closed; a gateway needs less.")
    compress_replies: bool = Field(default=False, description="Compress replies also for clients that accept several codings.")

    # start, readiness and end
    ready_timeout: float = Field(
        default=READY_SECONDS, gt=0, description="Seconds in which an idle device must answer a probe for readiness."
    )
    drain_seconds: float = Field(
        default=5.0, ge=0, description="Seconds after SIGTERM in which calls are accepted, but the server is not ready."
    )
    shutdown_seconds: int = Field(default=25, ge=1, description="Seconds that accepted calls may take to finish after that.")

    # logs and telemetry
    log_format: Literal["console", "json"] = Field(default="console", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level that is logged.")
    access_log: bool = Field(default=True, description="Log one line per request.")
    telemetry: bool = Field(default=False, description="Send traces and metrics by OTLP, configured by OTEL_… variables (extra `otel`).")

    # Ray Serve
    replicas: int = Field(default=4, ge=1, description="With Ray Serve: largest number of replicas.")
    replica_cpus: float = Field(default=1.0, gt=0, description="With Ray Serve: cores of each replica; fractions are allowed.")
    replica_gpus: float = Field(default=0.0, ge=0, description="With Ray Serve: GPUs of each replica; fractions are allowed.")
    shards: int = Field(default=0, ge=0, description="With Ray Serve: actors that share a call too large for one replica, by keys.")

    @field_validator("layers", mode="before")
    @classmethod
    def _from_json(cls, layers: Any) -> Any:
        try:
            return parse_strictly(layers.encode(), "text") if isinstance(layers, str) else layers
        except (RequestError, ValueError) as error:
            raise ValueError(f"expected JSON, such as {EXAMPLE}: {error}") from None

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    @model_validator(mode="after")
    def _ports_apart(self) -> Self:
        if self.port == self.grpc_port != 0 and self.uds is None:
            raise ValueError(f"port and grpc_port cannot both be {self.port}")
        return self

    @model_validator(mode="after")
    def _one_worker_with_sessions(self) -> Self:
        if self.session_memory and self.workers > 1:
            raise ValueError("sessions (session_memory) need one worker: run replicas, one worker each, behind a gateway or under Ray")
        return self

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses(cls, text: str) -> str:
        for item in () if text.strip() == "*" else filter(None, map(str.strip, text.split(","))):
            try:
                ipaddress.ip_network(item)
            except ValueError:
                raise ValueError(f"expected addresses or networks such as 10.0.0.0/8, with commas, or * alone, got {item!r}") from None
        return text

    def default_layer(self) -> LayerSpec:
        """The spec of the layer `default`. Raises Pydantic's ValidationError if the fields are not a valid spec."""
        given = {name: getattr(self, name) for name in LAYER_FIELDS}
        return LayerSpec(**{name: value for name, value in given.items() if value is not None})

    @property
    def is_local(self) -> bool:
        """Whether the server listens on a loopback address, which only this machine can reach."""
        try:
            return self.uds is None and ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.uds is None and self.host == "localhost"

    def all_layers(self) -> dict[str, LayerSpec]:
        """All configured layers by name. `default` is among them; `layers` may redefine it."""
        return {"default": self.default_layer(), **self.layers}


def read_settings(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """The settings of this process. Raises BadSettings, which names the setting and its source."""
    given = _given_values(flags, config)
    try:
        settings = Settings(**{name: value for name, (_, value) in given.items()})
        layers = settings.all_layers()
    except ValidationError as error:
        raise BadSettings("; ".join(_describe_error(item, given) for item in error.errors())) from None
    _check_layer_limits(settings, layers)
    return settings


def sources(flags: dict[str, Any], config: Path | None = None) -> dict[str, str]:
    """Setting -> source of its value: its flag, its variable, the file, or "default"."""
    return dict.fromkeys(Settings.model_fields, "default") | {name: source for name, (source, _) in _given_values(flags, config).items()}


def _given_values(flags: dict[str, Any], config: Path | None) -> dict[str, tuple[str, Any]]:
    """Setting -> (source, value), for the settings that do not have their defaults. Raises BadSettings for unknown names."""
    given = {name: (str(config), value) for name, value in _read_file(config).items()} if config else {}
    not_settings = {*injected_variables(), *CLIENT_VARIABLES}
    for variable, text in os.environ.items():
        if variable.startswith(PREFIX) and variable not in not_settings and not KUBERNETES_NAME.match(variable):
            name = variable.removeprefix(PREFIX).lower()
            if name not in Settings.model_fields:
                raise BadSettings(f"the environment variable {variable} is not a setting; see `attend serve --help`")
            given[name] = variable, text
    return given | {name: (f"--{name.replace('_', '-')}", value) for name, value in flags.items() if value is not None}


def _check_layer_limits(settings: Settings, layers: dict[str, LayerSpec]) -> None:
    """Raises BadSettings if a configured layer exceeds a limit."""

    def check(subject: str, count: int, limit: str, expected: str) -> None:
        if count > (most := getattr(settings, limit)):
            raise BadSettings(f"{subject}expected {expected.format(most)} ({limit}), got {count}")

    for name, spec in layers.items():
        if spec.init is None:
            raise BadSettings(f'the layer "{name}": expected an initialization of the weights (init), got null')
        check(f'the layer "{name}": ', spec.num_parameters, "max_layer_parameters", "at most {} parameters")
        check(f'the layer "{name}": ', spec.widest, "max_layer_width", "widths of at most {}")
    check("", len(layers), "max_layers", "at most {} layers")
    check("", sum(spec.num_parameters for spec in layers.values()), "max_total_parameters", "at most {} parameters in all layers")


def injected_variables() -> list[str]:
    """Variables that Kubernetes derives from a Service named attend, such as ATTEND_PORT=tcp://10.0.0.1:80. They are not settings."""
    return [name for name, text in os.environ.items() if name.startswith(PREFIX) and KUBERNETES_VALUE.match(text)]


def _read_file(config: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(config.read_text())
    except OSError as error:
        raise BadSettings(f"cannot read the settings file {config}: {error.strerror}") from None
    except ValueError as error:
        raise BadSettings(f"the settings file {config} is not TOML: {error}") from None
    for name in document:
        if name not in Settings.model_fields:
            raise BadSettings(f'"{name}" in {config} is not a setting; see `attend serve --help`')
    return document


def _describe_error(error: Any, given: dict[str, tuple[str, Any]]) -> str:
    """One of pydantic's errors as a sentence that begins with the source of the setting."""
    path = [str(part) for part in error["loc"] if part != "[key]"] or [error.get("ctx", {}).get("at", "").strip("/")]
    name, dotted = path[0], ".".join(path)
    source, within = given[name][0] if name in given else "", ""
    if source.startswith(("--", PREFIX)):
        within = f", at {dotted}" if len(path) > 1 else ""
    else:
        source = f"{dotted} in {source}" if source else dotted
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch" and len(path) == 1:  # the description is clearer than the pattern
        wanted = str(Settings.model_fields[name].description).rstrip(".")
        message = f"expected {wanted[0].lower()}{wanted[1:]}, got {json.dumps(error['input'])}"
    if error["type"] == "literal_error":
        message += did_you_mean(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]))
    source = f"{source}: " if name else ""  # an error about several settings names no single one
    return f"{source}{message[0].lower()}{message[1:]}{within}"
