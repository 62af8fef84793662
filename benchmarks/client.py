"""Milliseconds of a call through attend.client, and of the same bytes through httpx, measured in turn."""

import argparse
import time
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from load import SIZES, encode, print_table, random_arrays, serve_attend

from attend.client import Client, Retries


def alternate(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Seconds that each call took; the two calls alternate in going first."""
    times: list[list[float]] = [[] for _ in calls]
    order, began = list(range(len(calls))), time.perf_counter()
    while time.perf_counter() - began < seconds or not times[0]:
        for i in order:
            started = time.perf_counter()
            calls[i]()
            times[i].append(time.perf_counter() - started)
        order.reverse()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="small,mid")
    parser.add_argument("--seconds", type=float, default=4, help="each row")
    parser.add_argument("--port", type=int, default=8101)
    args = parser.parse_args()
    rows = []
    for size in [SIZES[name] for name in args.sizes.split(",")]:
        arrays = random_arrays(size.shape, np.random.default_rng(0))
        body, headers = encode("st", arrays)
        with (
            serve_attend(args.port, size.shape[-1], size.num_heads) as server,
            Client(server.url, retries=Retries(times=0)) as client,
            httpx.Client(base_url=server.url, timeout=60) as bare,
        ):
            calls = (
                lambda: client.attend(**arrays),  # noqa: B023  # called before the loop goes on
                lambda: bare.post("/attend", content=body, headers=headers).raise_for_status().content,  # noqa: B023
            )
            alternate(calls, args.seconds / 8)  # warm-up
            client_ms, httpx_ms = (float(np.median(times)) * 1e3 for times in alternate(calls, args.seconds))
        rows.append({"size": size.name, "httpx ms": httpx_ms, "client ms": client_ms, "of httpx": client_ms / httpx_ms})
    print_table(rows)


if __name__ == "__main__":
    main()
