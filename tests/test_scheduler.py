"""When short prompts wait for company, so that one step prefills several."""

from __future__ import annotations

import pytest

from ouro_batch.engine.kv import BlockManager
from ouro_batch.engine.request import Request
from ouro_batch.engine.scheduler import ENOUGH_TOKENS, Scheduler
from ouro_batch.params import SamplingParams


def request(number: int, prompt_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=4)
    return Request(number, [1] * prompt_tokens, params, 0, 4, 1.0, (), 0.0)


def scheduler(requests: int, **options) -> Scheduler:
    """Eight rows that decode."""
    options = {"max_batched_tokens": 4096, "gather": 3} | options
    made = Scheduler(BlockManager(10_000, 16, 4), rows=8, **options)
    for number in range(8):
        made.add(request(number))
    assert len(made.plan().start_rows) == 8  # with nothing running nobody waits for company
    for number in range(8, 8 + requests):
        made.add(request(number))
    return made


def finish(made: Scheduler, rows: int) -> None:
    for row in list(made.running)[:rows]:
        made.finish(made.running[row], stop_row=False)


def test_short_prompts_wait_for_company_while_others_decode():
    made = scheduler(20)
    for _ in range(2):
        finish(made, 1)
        assert not made.plan().start_rows
    finish(made, 1)
    assert len(made.plan().start_rows) == 3
    assert made.plan().decode_rows == 8


@pytest.mark.parametrize("waiting", [1, 2])
def test_the_last_requests_wait_for_nobody(waiting):
    made = scheduler(waiting)
    finish(made, waiting)
    assert len(made.plan().start_rows) == waiting


def test_a_long_prompt_is_company_enough():
    made = scheduler(0)
    made.add(request(100, ENOUGH_TOKENS))
    for number in range(20):
        made.add(request(number + 200))
    finish(made, 1)
    assert len(made.plan().start_rows) == 1


def test_while_a_prompt_is_prefilled_others_join_at_once():
    made = scheduler(0, max_batched_tokens=64)
    made.add(request(100, ENOUGH_TOKENS))
    for number in range(20):
        made.add(request(number + 200))
    finish(made, 1)
    assert len(made.plan().start_rows) == 1  # its first chunk
    finish(made, 1)
    assert len(made.plan().start_rows) == 1


def test_nobody_waits_where_nothing_is_gathered():
    made = scheduler(20, gather=1)
    finish(made, 1)
    assert len(made.plan().start_rows) == 1


def test_when_all_rows_are_free_everyone_starts():
    made = scheduler(2, gather=8)
    finish(made, 8)
    assert len(made.plan().start_rows) == 2
