"""Names where a decode step's time goes, kernel by kernel (operator by operator on a CPU)."""

from __future__ import annotations

import time
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ouro_batch.bench.measure import Requests
from ouro_batch.llm import LLM


def profile_steps(llm: LLM, requests: Requests, steps: int) -> dict[str, Any]:
    """Profile up to ``steps`` engine steps in which only decoding runs; ready for JSON.

    ``kernels`` lists name, calls, ``total_us`` and the share of the sum, longest first;
    ``busy_us`` is that sum and ``wall_us`` the time of the same steps under the profiler.
    """
    on_gpu = llm.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    queued = []
    try:
        for index, (prompt, own) in enumerate(zip(requests.prompts, requests.params, strict=True)):
            queued.append(llm.add_request(prompt, own, index=index))
        launched = -1
        # Prefill has ended once a step launches no more prompt tokens; one more leaves its wake.
        while launched != (launched := llm.snapshot().prompt_tokens) or not launched:
            llm.step()
        llm.step()
        done = 0
        with profile(activities=activities) as profiler:
            started = time.perf_counter()
            while done < steps and llm.has_unfinished:
                llm.step()
                done += 1
            wall = time.perf_counter() - started
    finally:
        for request_id in queued:
            llm.abort(request_id)
        while llm.has_unfinished:
            llm.step()
    kernels = []
    for event in profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total > 0:
            kernels.append({"name": event.key, "calls": event.count, "total_us": total})
    busy = sum(kernel["total_us"] for kernel in kernels)
    for kernel in kernels:
        kernel["share"] = kernel["total_us"] / busy
    kernels.sort(key=lambda kernel: -kernel["total_us"])
    return {"steps": done, "wall_us": wall * 1e6, "busy_us": busy, "kernels": kernels}
