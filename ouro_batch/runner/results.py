"""A step's results on their way from the device to the host, through pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ouro_batch.params import MAX_LOGPROBS, TokenLogprobs
from ouro_batch.runner.base import StepResult, TokenEvent


class PinnedResults:
    """One step's results on their way to the host."""

    def __init__(self, device: torch.device, rows: int):
        on_gpu = device.type == "cuda"
        self.values = torch.zeros(3 * rows + 1, dtype=torch.int32, pin_memory=on_gpu)
        self.logprobs = torch.zeros(
            rows, 1 + 2 * MAX_LOGPROBS, dtype=torch.int32, pin_memory=on_gpu
        )
        self.wanted: dict[int, int] = {}  # likeliest tokens by row
        self.arrived = torch.cuda.Event() if on_gpu else None

    def fetch(self, results: Tensor, logprobs: Tensor, wanted: dict[int, int]) -> None:
        """``wanted`` names the rows whose ``logprobs`` are to come too."""
        self.values.copy_(results, non_blocking=True)
        self.wanted = wanted
        if wanted:
            self.logprobs.copy_(logprobs, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> StepResult:
        if self.arrived is not None:
            self.arrived.synchronize()
        *table, rows_run = self.values.tolist()
        rows = len(table) // 3
        events = [
            TokenEvent(
                row,
                table[row],
                table[rows + row],
                bool(table[2 * rows + row]),
                self._logprobs(row),
            )
            for row in range(rows)
            if table[row] >= 0
        ]
        return StepResult(events, rows_run)

    def _logprobs(self, row: int) -> TokenLogprobs | None:
        k = self.wanted.get(row)
        if k is None:
            return None
        words = self.logprobs[row]
        chosen, *top = words[: 1 + k].view(torch.float32).tolist()
        ids = words[1 + MAX_LOGPROBS :][:k].tolist()
        return TokenLogprobs(chosen, list(zip(ids, top, strict=True)))
