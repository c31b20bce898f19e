"""The loop that ties scheduler and runner: plan a step, launch it, read the one before."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from ouro_batch.engine.request import Request, Status
from ouro_batch.engine.scheduler import Scheduler
from ouro_batch.engine.statistics import EngineStatistics
from ouro_batch.runner.base import Runner, StepResult, TokenEvent


@dataclass(frozen=True)
class StepOutput:
    """A request's new tokens in one step; ``finish_reason`` once there will be no more."""

    request_id: int
    token_ids: list[int]
    exit_depths: list[int]
    finish_reason: str | None


@dataclass(frozen=True)
class _InFlight:
    """A launched step: who held which row when it was launched."""

    owners: dict[int, Request]


class Engine:
    """Runs requests to their end. Not thread-safe.

    The host is one step behind the device: ``step`` launches a step before it reads the previous
    one, so a row that the host ends (a stop string, an abort) may run on for a step; what it
    produces then is dropped.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self.runner = runner
        self.statistics = EngineStatistics()
        self._requests: dict[int, Request] = {}
        self._in_flight: deque[_InFlight] = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        """Queue a request; its id must not be in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: int) -> Request | None:
        """End a request now, at whatever point of its life; None where it has ended already."""
        return self.end(request_id, "abort")

    def end(self, request_id: int, finish_reason: str) -> Request | None:
        """End a request for a reason that only the host knows (abort, a stop string)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, finish_reason, stop_row=True)
        return request

    def step(self) -> list[StepOutput]:
        """Launch the next step and return what the previous one produced.

        An exception of the runner ends every request; their blocks are free when it is raised.
        """
        try:
            plan = self.scheduler.plan()
            if plan:
                now = time.perf_counter()
                for start in plan.start_rows:
                    self.scheduler.running[start.row].admitted = now
                self.runner.launch(plan)
                self._in_flight.append(_InFlight(dict(self.scheduler.running)))
                self.statistics.observe_launch(plan, self.scheduler)
            outputs: list[StepOutput] = []
            # Nothing to launch: nothing to hide the wait behind, so catch up.
            while len(self._in_flight) > (1 if plan else 0):
                outputs += self._process(self._in_flight.popleft(), self.runner.collect())
            return outputs
        except BaseException:
            self._fail()
            raise

    def _process(self, launched: _InFlight, result: StepResult) -> list[StepOutput]:
        self.statistics.observe_rows(result.rows_run)
        outputs = []
        for event in result.events:
            request = launched.owners[event.row]
            if request.status is Status.FINISHED:
                self.statistics.dropped_tokens += 1
                continue
            self.statistics.observe_token(event.depth, first=not request.token_ids)
            if not request.token_ids:
                request.first_token = time.perf_counter()
            request.add_token(event.token, event.depth)
            if event.logprobs is not None:
                request.logprobs.append(event.logprobs)
            reason = self._finish_reason(request, event)
            if reason is not None:
                self._finish(request, reason, stop_row=not event.finished)
            else:
                self.scheduler.trim(request)
            outputs.append(
                StepOutput(request.request_id, [event.token], [event.depth], request.finish_reason)
            )
        return outputs

    def _finish_reason(self, request: Request, event: TokenEvent) -> str | None:
        if event.token in request.stop_ids:
            return "stop"
        if request.text is not None and request.text.push(event.token):
            return "stop"
        return "length" if event.finished else None

    def _finish(self, request: Request, reason: str, *, stop_row: bool) -> None:
        self.scheduler.finish(request, stop_row=stop_row)
        del self._requests[request.request_id]
        request.finish_reason = reason
        if request.text is not None:
            request.text.flush()
        request.finished = time.perf_counter()
        self.statistics.finish_reasons[reason] += 1

    def _fail(self) -> None:
        for request in list(self._requests.values()):
            self._finish(request, "abort", stop_row=True)
        self._in_flight.clear()
        self.runner.reset()
