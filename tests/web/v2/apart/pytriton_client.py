"""PyTriton's ModelClient against the servers named on the command line: http://host:port grpc://host:port.

It needs an environment of its own, since its wheel contains a whole Triton.
"""

import asyncio
import sys

import numpy as np
from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError

QUERY = np.random.default_rng(5).standard_normal((2, 3, 64)).astype(np.float32)
KEY = np.random.default_rng(6).standard_normal((2, 5, 64)).astype(np.float32)


def check(url: str) -> dict[str, np.ndarray]:
    """Batches, single items, positional and named inputs, parameters, errors. Returns the outputs of the batch."""
    with ModelClient(url, "default") as client:
        assert client.is_batching_supported
        batch = client.infer_batch(query=QUERY, key=KEY, block_keys=np.zeros((2, 5), np.bool_))
        assert batch["output"].shape == (2, 3, 64) and batch["attention_weights"].shape == (2, 8, 3, 5)
        positional = client.infer_batch(QUERY, KEY)
        sample = client.infer_sample(query=QUERY[1], key=KEY[1])
        for name, array in batch.items():
            np.testing.assert_allclose(positional[name], array, rtol=0, atol=1e-6)
            np.testing.assert_allclose(sample[name], array[1], rtol=0, atol=1e-6)
        lengths, offsets = np.array([[4], [2]]), np.array([[2], [0]])  # one item of the shape in the configuration
        shorter = client.infer_batch(query=QUERY, key=KEY, valid_lens=lengths, query_offset=offsets, parameters={"causal": True})
        assert not shorter["attention_weights"][1, ..., 2:].any() and shorter["attention_weights"][0, ..., :4].any()
        alone = client.infer_sample(query=QUERY[1], key=KEY[1], valid_lens=lengths[1], query_offset=offsets[1], parameters={"causal": True})
        np.testing.assert_allclose(alone["output"], shorter["output"][1], rtol=0, atol=1e-6)
        causal = client.infer_sample(query=QUERY[0], parameters={"causal": True})
        assert not np.triu(causal["attention_weights"], 1).any()
        try:
            client.infer_batch(query=QUERY[..., 1:])
        except PyTritonClientInferenceServerError as error:
            assert "expected 64 values per query" in str(error), error
        else:
            raise AssertionError("a query that does not fit was taken")
    if url.startswith("http"):  # this client uses HTTP for every URL
        with FuturesModelClient(url, "default", max_workers=4) as client:
            futures = [client.infer_batch(query=QUERY, key=KEY) for _ in range(8)]
            for future in futures:
                np.testing.assert_allclose(future.result()["output"], batch["output"], rtol=0, atol=1e-6)
    asyncio.run(check_asyncio(url, batch["output"]))
    return batch


async def check_asyncio(url: str, want: np.ndarray) -> None:
    async with AsyncioModelClient(url, "default") as client:
        replies = await asyncio.gather(*(client.infer_batch(query=QUERY, key=KEY) for _ in range(8)))
    for reply in replies:
        np.testing.assert_allclose(reply["output"], want, rtol=0, atol=1e-6)


over_http, over_grpc = map(check, sys.argv[1:])
np.testing.assert_allclose(over_http["output"], over_grpc["output"], rtol=0, atol=1e-6)
print("PyTriton's client: good")
