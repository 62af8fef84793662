"""The descriptions of all gRPC services: GRPCInferenceService, health and reflection.

protoc compiles `inference.proto` to `inference.binpb`: see .ci/run. The descriptions are in a separate pool, since tritonclient registers
messages of the same names in the default one.
"""

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


def _with_list(file: Any) -> Any:
    """The file of the health service with its method List, which the library lacks.
    https://github.com/grpc/grpc-proto/blob/master/grpc/health/v1/health.proto"""
    if any(message.name == "HealthListResponse" for message in file.message_type):
        return file
    package, message, repeated = f".{file.package}", descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, 3
    file.message_type.add(name="HealthListRequest")
    reply = file.message_type.add(name="HealthListResponse")
    entry = reply.nested_type.add(name="StatusesEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING)
    entry.field.add(name="value", number=2, label=1, type=message, type_name=f"{package}.HealthCheckResponse")
    entries = f"{package}.HealthListResponse.StatusesEntry"
    reply.field.add(name="statuses", number=1, label=repeated, type=message, type_name=entries)
    types = {"input_type": f"{package}.HealthListRequest", "output_type": f"{package}.HealthListResponse"}
    file.service[0].method.add(name="List", **types)
    return file


def _reflection_v1(file: Any) -> Any:
    """The file of the reflection service `v1`, which the library lacks: that of `v1alpha` under another name."""

    def renamed(text: str) -> str:
        return text.replace("v1alpha", "v1")

    file.name, file.package = renamed(file.name), renamed(file.package)
    for message in file.message_type:
        for one in message.field:
            if one.type_name:
                one.type_name = renamed(one.type_name)
    for method in file.service[0].method:
        method.input_type, method.output_type = renamed(method.input_type), renamed(method.output_type)
    return file


def _file_of(module: Any) -> Any:
    """The description of a module that protoc made."""
    return descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


POOL = descriptor_pool.DescriptorPool()
for _described in (_with_list(_file_of(health_pb2)), _file_of(reflection_pb2), _reflection_v1(_file_of(reflection_pb2))):
    POOL.Add(_described)  # reflection describes these services, too
HEALTH_LIST = message_factory.GetMessageClass(POOL.FindMessageTypeByName("grpc.health.v1.HealthListResponse"))
(_file,) = descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("inference.binpb").read_bytes()).file
POOL.Add(_file)
DESCRIPTOR = POOL.FindFileByName(_file.name)
SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"]
