"""CUDA graphs of a loop step: one a bucket of rows, captured when it is first needed."""

from __future__ import annotations

from collections.abc import Callable

import torch


def bucket_sizes(rows: int) -> list[int]:
    """Powers of two, and the number of rows itself."""
    sizes = [1]
    while 2 * sizes[-1] < rows:
        sizes.append(2 * sizes[-1])
    return sizes if rows == 1 else [*sizes, rows]


class StepGraphs:
    """Runs ``step(bucket)`` with the smallest bucket that holds the active rows.

    The first run of a bucket is not captured: it compiles kernels and does its work. Then the
    graph is captured, which runs nothing, and every later run replays it. Without a GPU every run
    is a plain call.
    """

    def __init__(self, step: Callable[[int], None], rows: int, device: torch.device):
        self._step = step
        self._sizes = bucket_sizes(rows)
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = None

    def run(self, rows: int) -> None:
        """One step for at most ``rows`` active rows."""
        bucket = next(size for size in self._sizes if size >= rows)
        graph = self._graphs.get(bucket)
        if graph is not None:
            graph.replay()
            return
        self._step(bucket)
        if self._device.type == "cuda":
            self._graphs[bucket] = self._capture(bucket)

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(bucket)
        self._pool = self._pool or graph.pool()
        return graph
