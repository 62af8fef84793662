"""The precision of a layer's products is its own, whatever other threads compute."""

import threading

import pytest
import torch

from attend.attention.numerics import matmul_precision

CPU, GPU = torch.device("cpu"), torch.device("meta")  # any device other than the CPU


def test_calls_on_a_cpu_leave_the_precision_of_the_process_as_it_is() -> None:
    """Small calls are computed on the event loop beside the device's thread."""
    with matmul_precision("medium", CPU):
        assert torch.get_float32_matmul_precision() == "highest"


def test_calls_on_a_gpu_with_different_precisions_exclude_each_other() -> None:
    inside, seen = threading.Event(), []

    def compute() -> None:
        inside.set()
        with matmul_precision("highest", GPU):
            seen.append(torch.get_float32_matmul_precision())

    other = threading.Thread(target=compute)
    with matmul_precision("medium", GPU):
        other.start()
        assert inside.wait(60)
        assert torch.get_float32_matmul_precision() == "medium"
        assert not seen
    other.join(60)
    assert seen == ["highest"]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_failing_call_does_not_leave_its_precision_behind(precision: str) -> None:
    with pytest.raises(ZeroDivisionError), matmul_precision(precision, GPU):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"
