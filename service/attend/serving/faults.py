"""The error of a call whose computation failed, by the exception: no memory, or a fault of the service."""

import errno
import traceback

import torch

from attend.errors import AttendError, OutOfMemory, ServiceFault

OUT_OF_MEMORY_MESSAGES = ("can't allocate memory", "can't start new thread", "failed to map segment")  # of torch, Python and the linker


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device ran out of memory."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY_MESSAGES)


def error_of_batch(error: BaseException) -> AttendError:
    """The error for every call of a batch that failed with `error`: OutOfMemory or ServiceFault.

    The cause of the latter has its traceback as a note, since frames, and those that called them, refer to the batch, which refers to this
    error. Such a cycle would keep the tensors.
    """
    if is_out_of_memory(error):
        return OutOfMemory("the call passed admission, but the memory for it was not there")
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_exception(error)).rstrip())
        error.__cause__ = error.__context__ = None
    fault = ServiceFault("computing failed")
    fault.__cause__ = error.with_traceback(None)
    return fault
