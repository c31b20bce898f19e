"""Capturing a graph, with a stand-in for CUDA's."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch

from ouro_batch.runner.graphs import StepGraphs


class Leftover:
    """In a cycle with itself, as an engine is with its graphs; ``died`` sees its end."""

    def __init__(self, died):
        self.me = self
        self.died = died

    def __del__(self):
        self.died()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_nothing_is_collected_during_a_capture(monkeypatch, fails, enabled):
    capturing = False
    deaths: list[bool] = []

    class Graph:
        def pool(self):
            return 1

        def replay(self):
            pass

    @contextmanager
    def graph(graph, pool):
        nonlocal capturing
        capturing = True
        try:
            yield
        finally:
            capturing = False

    def step(bucket):
        Leftover(lambda: deaths.append(capturing))
        cycles = []
        for _ in range(10_000):
            cycles.append([cycles])
        if capturing and fails:
            raise RuntimeError("no capture")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    if not enabled:
        gc.disable()
    try:
        graphs = StepGraphs(step, torch.device("cuda"))
        graphs.run(1)
        if fails:
            with pytest.raises(RuntimeError, match="no capture"):
                graphs.run(1)
        else:
            graphs.run(1)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    gc.collect()
    assert len(deaths) == 2
    assert True not in deaths
