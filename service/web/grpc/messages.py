"""The messages of GRPCInferenceService as classes. protoc compiles `inference.proto` to `inference.binpb`: see .ci/run.

They are in a separate descriptor pool, since tritonclient registers messages of the same names in the default one.
"""

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

POOL = descriptor_pool.DescriptorPool()
for module in (health_pb2, reflection_pb2):  # reflection describes these services, too
    POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
(_file,) = descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("inference.binpb").read_bytes()).file
POOL.Add(_file)
DESCRIPTOR = POOL.FindFileByName(_file.name)
SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"]


def __getattr__(name: str) -> Any:
    """The class of the message of that name."""
    if name not in DESCRIPTOR.message_types_by_name:
        raise AttributeError(name)
    return message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name[name])
