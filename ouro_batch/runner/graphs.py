"""CUDA graphs of a step: one a bucket of its size, captured when the bucket comes again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch


def bucket_sizes(rows: int) -> list[int]:
    """Powers of two, and the number of rows itself."""
    sizes = [1]
    while 2 * sizes[-1] < rows:
        sizes.append(2 * sizes[-1])
    return sizes if rows == 1 else [*sizes, rows]


class StepGraphs:
    """Runs ``step(bucket)``, in which the bucket decides every shape.

    The first run of a bucket is a plain call: it compiles kernels and does its work. The second
    captures a graph, which runs nothing, and replays it as every later one does. Without a GPU
    every run is a plain call.
    """

    def __init__(self, step: Callable[..., None], device: torch.device):
        self._step = step
        self._device = device
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = None

    def run(self, *bucket: Hashable) -> None:
        """One step of a bucket."""
        graph = self._graphs.get(bucket)
        if graph is None:
            if self._device.type != "cuda" or bucket not in self._seen:
                self._seen.add(bucket)
                self._step(*bucket)
                return
            graph = self._graphs[bucket] = self._capture(bucket)
        graph.replay()

    def _capture(self, bucket: tuple[Hashable, ...]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
            self._step(*bucket)
        self._pool = self._pool or graph.pool()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector waits: what it finds may be another engine's graph.

    To destroy one while another is captured makes the capture fail.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
