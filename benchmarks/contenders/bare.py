"""torch's module with no server. Arguments: input .npz, output .npz, seconds. Prints the rate and the median and p99 in milliseconds."""

import sys
import time

import numpy as np
import torch
from layer import attend

inputs, outputs, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
arrays = np.load(inputs)
tensors = [torch.from_numpy(arrays[name]) for name in ("query", "key", "value")]
if not arrays["visible"].all():
    tensors.append(~torch.from_numpy(arrays["visible"]))
output, _ = attend(*tensors)
np.save(outputs, output.numpy())
times: list[float] = []
until = time.perf_counter() + seconds
while time.perf_counter() < until:
    started = time.perf_counter()
    attend(*tensors)
    times.append(time.perf_counter() - started)
p50, p99 = np.percentile(times, (50, 99)) * 1e3
print(len(times) / sum(times), p50, p99)
