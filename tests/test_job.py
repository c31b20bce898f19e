"""Reading, running and writing a job, with a fake LLM."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import orjson
import pytest

from ouro_batch.errors import EngineError
from ouro_batch.jobs.ahead import ReadAhead
from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.interrupt import Interrupt
from ouro_batch.jobs.job import Job
from ouro_batch.jobs.reader import Line, check_inputs, count_records, read_lines
from ouro_batch.jobs.records import RecordError, parse_record
from ouro_batch.jobs.statistics import JobCounts, job_statistics
from ouro_batch.jobs.writer import check_apart, open_writer, write_atomically
from ouro_batch.params import SamplingParams
from tests.fakes import FakeLLM


class ListWriter:
    def __init__(self):
        self.records = []
        self.written = 0

    def holds(self, index):
        return False

    def kept(self, line, input_hash, sample=0, id=None):
        return None

    def write(self, record, input_hash):
        self.records.append(record)
        self.written += 1


def jsonl(path, *records):
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return str(path)


def run_job(llm, *inputs, writer=None, **options):
    writer = writer or ListWriter()
    job = Job(llm, inputs, writer, **options)
    job.run()
    return job, writer.records


# Reading


@pytest.mark.parametrize(
    ("line", "once", "thrice"),
    [
        (b'{"prompt": "a"}', 1, 3),
        (b'{"prompt": "a", "n": 2}', 2, 2),
        (b'{"prompt": "a", "n": null}', 1, 3),
        (rb'{"prompt": "\"n\": 5"}', 1, 3),
        (b'{"prompt": "a", "metadata": {"n": 5}}', 1, 3),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "n": 4}}', 4, 4),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}', 1, 3),
        (b'{"prompt": "a", "n": 0}', 1, 1),
        (b'{"prompt": "a", "n": "many"}', 1, 1),
        (b'{"prompt": "a", "n": 2', 1, 1),
        (b'["n"]', 1, 1),
    ],
)
def test_requests_are_counted_and_not_lines(tmp_path, line, once, thrice):
    """Before a job; with and without samples that the command line asks for."""
    path = tmp_path / "in"
    path.write_bytes(line + b"\n")
    for samples, expected in ((1, once), (3, thrice)):
        assert count_records([str(path)], samples) == expected
        defaults = SamplingParams(n=samples)
        try:
            record = parse_record(Line(0, 1, "in", line), defaults)
        except RecordError:
            assert expected == 1
        else:
            assert expected == record.params.n
        assert count_records([str(path)], samples, text=True) == samples


def test_lines_keep_their_numbers_and_count_across_files(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b'\xef\xbb\xbf{"a"}\r\n\n \t\r\n{"b"}\n')
    second.write_bytes(b'\n{"c\xe2\x80\xa8\x0b\x0c"}')
    lines = list(read_lines([str(first), str(second)]))
    assert [(line.index, line.number, line.data) for line in lines] == [
        (0, 1, b'{"a"}'),
        (1, 4, b'{"b"}'),
        (2, 2, b'{"c\xe2\x80\xa8\x0b\x0c"}'),
    ]
    assert [line.source for line in lines] == [str(first), str(first), str(second)]
    assert count_records([str(first), str(second)]) == 3


def test_standard_input_has_no_known_count(tmp_path):
    assert count_records([jsonl(tmp_path / "a", 1), "-"]) is None


def test_reader_stays_a_bounded_number_of_lines_ahead(tmp_path):
    reader = ReadAhead([jsonl(tmp_path / "a", *range(1000))], ahead=10)
    seen = [reader.poll(2.0).index]
    time.sleep(0.1)
    assert reader._items.qsize() <= 10
    while not reader.ended:
        line = reader.poll(0.5)
        if line is not None:
            seen.append(line.index)
    assert seen == list(range(1000))


def test_a_failing_input_is_raised_where_lines_are_used(tmp_path):
    reader = ReadAhead([str(tmp_path / "gone")])
    with pytest.raises(FileError, match="gone"):
        reader.poll(2.0)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_missing_input_and_folder_are_refused(tmp_path, make):
    make(tmp_path / "in")
    with pytest.raises(UsageError, match=r"cannot read .*in"):
        check_inputs([str(tmp_path / "in")])


def test_standard_input_twice_is_refused():
    with pytest.raises(UsageError, match="only once"):
        check_inputs(["-", "-"])


# Running


def test_every_line_has_a_record_and_failures_do_not_stop_the_job(tmp_path):
    source = tmp_path / "in"
    source.write_bytes(
        b'{"prompt": "hello", "max_tokens": 2}\n'
        b"not json\n\n"
        b'{"id": "r", "prompt": "refuse me"}\n'
        b'{"id": "u", "prompt": "x", "top": 1}\n'
        b'{"id": "m", "messages": [{"role": "user", "content": "hi"}],'
        b' "chat_template_kwargs": {"suffix": "!"}}\n'
        b'{"prompt": [97, 98], "seed": 5}\n'
    )
    job, records = run_job(FakeLLM("x", seed=2), str(source))
    records = sorted(records, key=lambda record: record["index"])
    assert [record["index"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert [record["id"] for record in records] == [0, None, "r", "u", "m", 5]
    assert [record.get("text") for record in records] == ["HE", None, None, None, "HI!", "AB"]
    assert records[0]["finish_reason"] == "length"
    assert records[0]["seed"] == 2000
    assert records[5]["seed"] == 5
    assert records[2]["error"] == {
        "type": "too_long",
        "message": "the prompt needs 9,999 tokens of cache",
        "line": 4,
    }
    assert records[1]["error"]["line"] == 2
    assert (job.counts.ok, job.counts.failed) == (3, 3)
    assert job.counts.errors == {"invalid_json": 1, "too_long": 1, "invalid_request": 1}


def test_waiting_requests_stay_in_a_window(tmp_path):
    llm = FakeLLM("x", max_rows=50)
    _, records = run_job(llm, jsonl(tmp_path / "in", *[{"prompt": "abc"}] * 2000))
    assert len(records) == 2000
    assert 50 < llm.most_waiting <= 100


def test_defaults_and_token_ids(tmp_path):
    source = jsonl(tmp_path / "in", {"prompt": "abc"}, {"prompt": "abc", "max_tokens": 3})
    _, records = run_job(FakeLLM("x"), source, defaults={"max_tokens": 1}, token_ids=True)
    assert [(record["text"], record["token_ids"]) for record in records] == [
        ("A", [65]),
        ("ABC", [65, 66, 67]),
    ]


def test_engine_error_ends_the_job_with_what_has_finished(tmp_path):
    source = jsonl(tmp_path / "in", {"prompt": "ab"}, {"prompt": "abcdefgh"})
    writer = ListWriter()
    with pytest.raises(EngineError):
        run_job(FakeLLM("breaks"), source, writer=writer)
    assert [record["text"] for record in writer.records] == ["AB"]


@pytest.mark.parametrize("time_left", [True, False])
def test_an_interrupt_lets_what_runs_finish_while_there_is_time(tmp_path, time_left):
    llm, writer, interrupt, told = FakeLLM("x", max_rows=2), ListWriter(), Interrupt(), []
    source = jsonl(tmp_path / "in", *[{"prompt": "abcd"}] * 90)
    job = Job(llm, [source], writer, interrupt=interrupt, stopping=told.append)
    wait_until = time.monotonic() + 5
    while len(llm.requests) < 3 and time.monotonic() < wait_until:
        job._feed()
    real_step = llm.step

    def step():
        interrupt.requested = True
        if not time_left:
            interrupt.deadline = 0.0
        return real_step()

    llm.step = step
    with pytest.raises(KeyboardInterrupt):
        job.run()
    assert len(writer.records) == (2 if time_left else 0)
    assert told == ([2] if time_left else [])
    assert not llm.has_unfinished


def test_running_requests_do_not_wait_for_a_slow_producer(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = ListWriter()
    job = Job(FakeLLM("x"), [str(pipe)], writer)
    thread = threading.Thread(target=job.run)
    thread.start()
    with open(pipe, "wb", buffering=0) as producer:
        for count in (1, 2):
            producer.write(b'{"prompt": "ab"}\n')
            deadline = time.monotonic() + 5
            while writer.written < count and time.monotonic() < deadline:
                time.sleep(0.01)
            assert writer.written == count
    thread.join(5)
    assert not thread.is_alive()


def test_first_answers_are_kept_for_a_preview(tmp_path):
    source = jsonl(tmp_path / "in", *[{"prompt": "a" * n} for n in (9, 1, 5)])
    job, _ = run_job(FakeLLM("x"), source, keep_first=2)
    assert {index: answer.output.text for index, answer in job.answers.items()} == {
        0: "A" * 9,
        1: "A",
    }


# Writing


def record(index):
    return {"index": index, "text": "x" * index}


def indices(path):
    entries = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return [entry["index"] for entry in entries if "index" in entry]


def begun(*arguments, **options):
    writer = open_writer(*arguments, **options)
    writer.begin({"model": "m"})
    return writer


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1], []])
def test_records_end_in_input_order(tmp_path, order):
    out = tmp_path / "out"
    writer = begun(str(out))
    for index in order:
        writer.write(record(index))
    assert indices(writer.part) == order
    assert not out.exists()
    writer.complete()
    writer.finish()
    assert indices(out) == sorted(order)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_finished_records_are_kept_in_the_part(tmp_path):
    writer = begun(str(tmp_path / "out"))
    writer.write(record(1))
    assert writer.keep() == str(tmp_path / "out.part")
    assert indices(tmp_path / "out.part") == [1]


def test_an_empty_part_is_not_left_behind(tmp_path):
    assert begun(str(tmp_path / "out")).keep() is None
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_unless_overwritten(tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(UsageError, match=r"exists.*--overwrite"):
        open_writer(str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    writer = begun(str(tmp_path / "out"), overwrite=True)
    writer.write(record(0))
    writer.complete()
    writer.finish()
    assert indices(tmp_path / "out") == [0]


def test_overwriting_keeps_the_old_output_until_the_end(tmp_path):
    (tmp_path / "out").write_text("old")
    writer = begun(str(tmp_path / "out"), overwrite=True)
    writer.write(record(0))
    assert (tmp_path / "out").read_text() == "old"
    writer.keep()


def test_a_link_keeps_pointing_to_the_output(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    writer = begun(str(tmp_path / "link"), overwrite=True)
    writer.write(record(0))
    writer.complete()
    writer.finish()
    assert (tmp_path / "link").is_symlink()
    assert indices(tmp_path / "real") == [0]


def test_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    writer = begun(str(tmp_path / "out"))
    writer.write(record(0))
    real = os.write

    def half(file, data):
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(file, data[: len(data) - 5])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(FileError, match="No space left"):
        writer.write(record(1))
    monkeypatch.undo()
    assert writer.keep() == str(tmp_path / "out.part")
    assert indices(tmp_path / "out.part") == [0]


def test_a_device_is_written_to_and_never_replaced():
    writer = begun("/dev/null", overwrite=True)
    writer.write(record(0))
    writer.complete()
    writer.finish()
    assert not os.path.isfile("/dev/null")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_full_stream():
    writer = begun("/dev/full")
    with pytest.raises(FileError, match="No space left"):
        writer.write(record(0))


def test_one_file_is_not_read_and_written(tmp_path):
    source = jsonl(tmp_path / "in", 1)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "soft").symlink_to(source)
    for output in (source, str(tmp_path / "hard"), str(tmp_path / "soft")):
        with pytest.raises(UsageError, match="input too"):
            check_apart([source], output, None)
    with pytest.raises(UsageError, match="input too"):
        check_apart([source], "-", source)
    part = jsonl(tmp_path / "out.part", 1)
    with pytest.raises(UsageError, match="input too"):
        check_apart([part], str(tmp_path / "out"), None)
    with pytest.raises(UsageError, match="both"):
        check_apart([source], str(tmp_path / "out"), str(tmp_path / "out"))
    check_apart([source], str(tmp_path / "out"), str(tmp_path / "out.stats.json"))


def test_a_failed_atomic_write_changes_nothing(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def chunks():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(target, chunks())
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Statistics


def test_statistics_count_decode_tokens_only(tmp_path):
    source = jsonl(tmp_path / "in", {"prompt": "abcd"}, {"prompt": "a"}, {"prompt": ""})
    llm = FakeLLM("x")
    job, _ = run_job(llm, source)
    stats = job_statistics(llm, job.counts, options={"max_rows": 4}, settings={"n": 1}, load_s=1.5)
    # A, B, C, D have code points 65 to 68; A comes from prefill and does not count.
    assert stats["exit_depth"] == {"mean": 2.0 + 2 / 3, "histogram": {"1": 1, "3": 1, "4": 1}}
    assert stats["requests"]["total"] == 3
    assert stats["requests"]["errors"] == {"invalid_request": 1}
    assert stats["requests"]["finish_reasons"] == {"stop": 2}
    assert stats["tokens"] == {"prompt": 5, "completion": 5, "decode": 3}
    assert stats["loops_decoded"] == 8
    assert stats["seconds"]["load"] == 1.5
    assert stats["model"]["revision"] == "f" * 40
    assert stats["engine"]["rows_in_use"]["max"] == 4
    assert orjson.loads(orjson.dumps(stats)) == stats


def test_statistics_of_nothing_divide_by_nothing():
    counts = JobCounts()
    assert counts.mean_exit_depth is None
    assert counts.per_second("completion_tokens") == 0.0


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input():
    """A million short lines through the real reader and writer; in a process of its own."""
    command = [sys.executable, "-m", "tests.job_throughput", "1000000"]
    result = subprocess.run(command, capture_output=True, cwd=Path(__file__).parents[1], check=True)
    measured = orjson.loads(result.stdout)
    assert measured["lines"] == 1_000_000
    assert measured["mib_at_most"] - measured["mib_after_a_tenth"] <= 50
