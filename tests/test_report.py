"""The timeline of a job and the report made of finished outputs."""

import itertools

from ouro_batch.jobs.job import Job
from ouro_batch.jobs.reader import LineReader
from ouro_batch.jobs.statistics import Timeline
from tests.fakes import FakeLLM, FakeSnapshot
from tests.test_job import ListWriter, jsonl


def snapshot(tokens):
    return FakeSnapshot(2, 4, 1, 6, 64, 10 * tokens, tokens, tokens, 2 * tokens)


# Timeline


def test_a_timeline_stays_short_and_ends_at_the_end():
    timeline = Timeline(limit=16, interval_s=1.0)
    for second in range(1001):
        timeline.observe(float(second), second, snapshot(5 * second))
    samples = timeline.to_list()
    assert 8 <= len(samples) <= 17
    assert (samples[0]["t_s"], samples[-1]["t_s"]) == (0, 1000)
    gaps = {b["t_s"] - a["t_s"] for a, b in itertools.pairwise(samples[:-1])}
    assert len(gaps) == 1, "thinned samples stay evenly spaced"
    assert all(sample["completion_tokens"] == 5 * sample["t_s"] for sample in samples)


def test_a_timeline_skips_what_follows_too_soon():
    timeline = Timeline(limit=100, interval_s=1.0)
    for tick in range(21):
        timeline.observe(tick / 10, tick, snapshot(tick))
    assert [sample["t_s"] for sample in timeline.to_list()] == [0, 1, 2]
    assert Timeline().to_list() == []


def test_a_job_records_its_timeline(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"prompt {i}"} for i in range(9)))
    job = Job(FakeLLM("fake"), LineReader([source]), ListWriter())
    job.run()
    last = job.counts.timeline.to_list()[-1]
    assert (last["requests_done"], last["completion_tokens"], last["rows_in_use"]) == (9, 72, 0)
