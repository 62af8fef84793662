"""The gRPC code of each error class. A class without a row has the code of its nearest ancestor, as in `web/errors.py`."""

import grpc

from service import errors

CODES: dict[type[errors.AttendError], grpc.StatusCode] = {
    errors.AttendError: grpc.StatusCode.INTERNAL,
    errors.RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.LayerNotFound: grpc.StatusCode.NOT_FOUND,
    errors.LayerConflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CapacityError: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CallerGone: grpc.StatusCode.CANCELLED,
}


def code_of(error: errors.AttendError) -> grpc.StatusCode:
    """The code of the error's class, or of its nearest ancestor in the table."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
