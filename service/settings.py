"""Every setting of a server, read once: flags over environment (ATTEND_…) over a TOML file over the defaults here. Frozen afterwards.

Only `cli` and `web/app` import this; everything below gets the values it needs. Unknown names are refused wherever they stand.
"""

import ipaddress
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from service.spec import DType, Init, LayerSpec, MatmulPrecision
from service.wire.limits import MIB
from service.wire.schemas.attend import LAYER_NAME

PREFIX = "ATTEND_"
INJECTED = re.compile(r"(tcp|udp|sctp)://")  # how the value of such a variable begins
CALLERS = {"ATTEND_API_KEY", "ATTEND_CA"}  # what clients and commands with --url read; no setting of a server
KUBERNETES = re.compile(r"ATTEND_(SERVICE|PORT)_")  # what it puts into every pod beside a Service of the name attend
LISTED = r"^\s*(({})\s*(,\s*|$))*$"  # items of that form, with commas
EXAMPLE = '{"small": {"d_model": 8, "num_heads": 2}}'
LAYER_FIELDS = ("d_model", "num_heads", "key_dim", "value_dim", "bias", "scale", "softcap", "seed", "init", "dtype", "matmul_precision")


class BadSettings(Exception):
    """A setting that does not exist or has no sensible value; the message names it and where it came from."""


class Settings(BaseSettings):
    """All settings. The description of each field is its help text, on the command line and in the README."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    grpc_port: int | None = Field(default=None, ge=0, le=65535, description="Port for gRPC beside it (extra `grpc`); none if not set.")
    device: str = Field(default="cpu", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="cpu, cuda, cuda:1, … or auto.")
    threads: int | None = Field(default=None, ge=1, description="Threads for arithmetic; the cores this process may use if not set.")
    workers: int = Field(default=1, ge=1, description="Processes behind the one port, each with its own layers.")

    d_model: int = Field(default=64, description="Width of the layer `default`.")
    num_heads: int = Field(default=8, description="Heads of the layer `default`.")
    key_dim: int | None = Field(default=None, description="Width of its keys; d_model if not set.")
    value_dim: int | None = Field(default=None, description="Width of its values; d_model if not set.")
    bias: bool | None = Field(default=None, description="Whether its projections have biases; depends on init if not set.")
    scale: float | None = Field(default=None, description="Its factor on query·key; 1/sqrt(head_dim) if not set.")
    softcap: float | None = Field(default=None, description="Its softcap; none if not set.")
    seed: int = Field(default=0, description="Seed of its weights.")
    init: Init = Field(default="xavier_uniform", description="How its weights are drawn.")
    dtype: DType = Field(default="float32", description="Of its weights and arithmetic.")
    matmul_precision: MatmulPrecision = Field(default="highest", description="Of its float32 products; high and medium allow TF32.")
    layers: Annotated[dict[Annotated[str, Field(pattern=LAYER_NAME)], LayerSpec], NoDecode] = Field(
        default={}, description="More layers by name; tables [layers.NAME] in the file, JSON elsewhere."
    )

    layers_dir: Path | None = Field(default=None, description="Folder that keeps layers put over HTTP; in memory alone if not set.")

    max_body_bytes: int = Field(default=128 * MIB, ge=1024, description="Largest request body.")
    max_grpc_bytes: int = Field(default=32 * MIB, ge=1024, description="Largest gRPC message, request or reply; max_body_bytes if less.")
    max_layer_bytes: int = Field(default=1024 * MIB, ge=1024, description="Largest safetensors body or file that brings or keeps a layer.")
    max_depth: int = Field(default=64, ge=8, le=1000, description="Deepest nesting of a JSON body.")
    max_layer_parameters: int = Field(default=1 << 28, ge=1, description="Largest layer.")
    max_layer_width: int = Field(default=1 << 16, ge=1, description="Widest row that a layer takes, projects to or gives.")
    max_total_parameters: int = Field(default=1 << 30, ge=1, description="All layers together.")
    max_layers: int = Field(default=1000, ge=1, description="Layers held at once, `default` among them.")
    max_scores: int = Field(default=1 << 28, ge=1, description="Attention weights and scores one reply may hold.")
    max_memory_bytes: int = Field(default=4096 * MIB, ge=MIB, description="Predicted memory of one call.")

    max_queue_operations: int = Field(default=2 * 10**12, ge=1, description="Predicted work that may wait.")
    max_queue_bytes: int = Field(default=2048 * MIB, ge=MIB, description="Predicted memory that may wait; also, bodies and replies held.")
    max_batch_calls: int = Field(default=64, ge=1, description="Calls computed together.")
    batch_delay: float = Field(default=0.0, ge=0, le=10, description="Seconds an idle device waits for more calls before it runs a batch.")
    request_timeout: float | None = Field(default=None, gt=0, description="Deadline in seconds of requests that set none.")

    compress_replies: bool = Field(default=False, description="Compress for all who accept it, not only for those who accept one coding.")
    drain_seconds: float = Field(default=5.0, ge=0, description="After SIGTERM, how long readiness says no while work is still taken.")
    shutdown_seconds: int = Field(default=25, ge=1, description="After that, how long accepted work may take to finish.")

    max_operations: int = Field(default=10**13, ge=1, description="Predicted work of one call, in floating-point operations.")
    max_batch_items: int = Field(default=65536, ge=1, description="Batch axis of one call.")
    max_pairs: int = Field(default=1 << 36, ge=1, description="Heads x queries x keys of one batch item.")
    max_reply_bytes: int = Field(default=2048 * MIB, ge=1024, description="Predicted size of one reply.")
    max_tensors: int = Field(default=1024, ge=16, description="Tensors in one body, and members of one JSON object.")

    keys_file: Path | None = Field(default=None, description="Keys of callers (`attend keys add`): then every route but health wants one.")
    allowed_hosts: str = Field(
        default="",
        pattern=LISTED.format(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+"),
        description="Names that Host may have, without ports, with commas, or *; if not set, localhost on loopback without keys, else any.",
    )
    cors_origins: str = Field(
        default="",
        pattern=LISTED.format(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@,]+"),
        description="Origins of web pages that may call, such as https://a.example, with commas, or *; none if not set.",
    )
    tls_cert: Path | None = Field(default=None, description="Certificate chain (PEM); with --tls-key the server speaks HTTPS.")
    tls_key: Path | None = Field(default=None, description="Private key (PEM) of that certificate.")
    uds: Path | None = Field(default=None, description="A Unix socket to listen on instead of host and port.")
    root_path: str = Field(default="", pattern=r"^(/[^/?#]+)*$", description="Prefix that a proxy in front takes away, such as /attend.")
    trusted_proxies: str = Field(
        default="", description="Addresses or networks whose X-Forwarded-For and -Proto are believed, with commas, or *."
    )
    client_timeout: float = Field(default=20.0, gt=0, description="Seconds that request headers may take.")
    min_client_rate: int = Field(
        default=32768, ge=1, description="Bytes per second, averaged over client_timeout, at which a body must come and a reply be taken."
    )
    keepalive_timeout: float = Field(
        default=75.0, gt=0, description="Seconds until an idle connection is closed; a gateway in front must close its own earlier."
    )
    ready_timeout: float = Field(
        default=2.0,
        gt=0,
        description="Seconds in which the device must answer to be ready; a long call may take ten times its predicted time more.",
    )
    telemetry: bool = Field(default=False, description="Traces and metrics by OTLP, as OTEL_… variables say (extra `otel`).")

    replicas: int = Field(default=4, ge=1, description="Under Ray Serve: most replicas that autoscaling starts.")
    replica_cpus: float = Field(default=1.0, gt=0, description="Under Ray Serve: cores of a replica, or a fraction of one.")
    replica_gpus: float = Field(default=0.0, ge=0, description="Under Ray Serve: GPUs of a replica, or a fraction of one.")
    shards: int = Field(
        default=0, ge=0, description="Under Ray Serve: actors that share the keys of a call too large for one process; none at 0."
    )

    log_format: Literal["console", "json"] = Field(default="console", description="How log lines are written.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    access_log: bool = Field(default=True, description="One log line per request.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = {name: text for name, text in env_settings.env_vars.items() if not (text and INJECTED.match(text))}
        return init_settings, env_settings

    @field_validator("layers", mode="before")
    @classmethod
    def _from_json(cls, layers: Any) -> Any:
        try:
            return json.loads(layers) if isinstance(layers, str) else layers
        except ValueError as error:
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
        """The spec of the layer `default`. Raises pydantic's ValidationError where the fields do not make one."""
        given = {name: getattr(self, name) for name in LAYER_FIELDS}
        return LayerSpec(**{name: value for name, value in given.items() if value is not None})

    def all_layers(self) -> dict[str, LayerSpec]:
        """Every configured layer by name; `default` among them, which the table `layers` may define instead."""
        return {"default": self.default_layer(), **self.layers}


def read_settings(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """The settings of this process. Raises BadSettings, which names what is wrong and where it was set."""
    known = set(Settings.model_fields)
    for name in os.environ:
        ours = name.startswith(PREFIX) and name not in injected_variables() and not KUBERNETES.match(name) and name not in CALLERS
        if ours and name.removeprefix(PREFIX).lower() not in known:
            raise BadSettings(f"the environment variable {name} is no setting; see `attend serve --help`")
    from_file, in_environment = _file(config, known) if config else {}, _in_environment()
    flags = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = Settings(**{k: v for k, v in from_file.items() if k not in in_environment} | flags)
        layers = settings.all_layers()
    except ValidationError as error:
        raise BadSettings("; ".join(_complaint(item, flags, in_environment, config) for item in error.errors())) from None
    _demand_makeable(settings, layers)
    return settings


def _demand_makeable(settings: Settings, layers: dict[str, LayerSpec]) -> None:
    """Raises BadSettings where a configured layer could never be made."""
    together = 0
    for name, spec in layers.items():
        together += spec.num_parameters
        if spec.init is None:
            raise BadSettings(f'the layer "{name}": expected a way to draw the weights (init), got null')
        if spec.num_parameters > settings.max_layer_parameters:
            wanted = f"at most {settings.max_layer_parameters} parameters (max_layer_parameters)"
            raise BadSettings(f'the layer "{name}": expected {wanted}, got {spec.num_parameters}')
        if spec.widest > settings.max_layer_width:
            wanted = f"widths of at most {settings.max_layer_width} (max_layer_width)"
            raise BadSettings(f'the layer "{name}": expected {wanted}, got {spec.widest}')
    if len(layers) > settings.max_layers:
        raise BadSettings(f"expected at most {settings.max_layers} layers (max_layers), got {len(layers)}")
    if together > settings.max_total_parameters:
        wanted = f"at most {settings.max_total_parameters} parameters in all layers (max_total_parameters)"
        raise BadSettings(f"expected {wanted}, got {together}")


def sources(flags: dict[str, Any], config: Path | None = None) -> dict[str, str]:
    """Where the value of every setting comes from: its flag, its variable, the file, or "default"."""
    from_file, in_environment = _file(config, set(Settings.model_fields)) if config else {}, _in_environment()
    origins = dict.fromkeys(Settings.model_fields, "default")
    origins |= {name: str(config) for name in from_file}
    origins |= {name: f"{PREFIX}{name.upper()}" for name in in_environment}
    return origins | {name: f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None}


def _in_environment() -> set[str]:
    injected = set(injected_variables())
    return {name for name in Settings.model_fields if f"{PREFIX}{name.upper()}" in os.environ.keys() - injected}


def injected_variables() -> list[str]:
    """Variables that Kubernetes made of a Service of the name attend, such as ATTEND_PORT=tcp://10.0.0.1:80; they are no settings."""
    return [name for name, text in os.environ.items() if name.startswith(PREFIX) and INJECTED.match(text)]


def _file(config: Path, known: set[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(config.read_text())
    except OSError as error:
        raise BadSettings(f"cannot read the settings file {config}: {error.strerror}") from None
    except ValueError as error:
        raise BadSettings(f"the settings file {config} is no TOML: {error}") from None
    for name in document:
        if name not in known:
            raise BadSettings(f'"{name}" in {config} is no setting; see `attend serve --help`')
    return document


def _complaint(error: Any, flags: dict[str, Any], in_environment: set[str], config: Path | None) -> str:
    path = [str(part) for part in error["loc"] if part != "[key]"] or [error.get("ctx", {}).get("at", "").strip("/")]
    name, within = path[0], f", at {'.'.join(path)}" if len(path) > 1 else ""
    if name in flags:
        source = f"--{name.replace('_', '-')}"
    elif name in in_environment:
        source = f"{PREFIX}{name.upper()}"
    else:
        source, within = f"{'.'.join(path)} in {config}" if config else ".".join(path), ""
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch" and len(path) == 1:  # a pattern says less than the description
        wanted = str(Settings.model_fields[name].description).rstrip(".")
        message = f"expected {wanted[0].lower()}{wanted[1:]}, got {json.dumps(error['input'])}"
    source = f"{source}: " if name else ""  # what several settings must agree on has no one place
    return f"{source}{message[0].lower()}{message[1:]}{within}"


def settings_table() -> str:
    """Every setting as a Markdown table; the documentation holds it, and a test that it does."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = (
            "" if field.default in (None, {}) else f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
        )
        rows.append(f"| `--{name.replace('_', '-')}` | {default} | {field.description} |")
    return "\n".join(rows)
