"""A job that is disturbed from outside: signals, readers that go, disks that are full."""

import os
import re
import signal
import subprocess
import time

import orjson
import pytest

from .test_cli_run import (
    COMMAND,
    PROMPTS,
    lines,
    names,
    part_entries,
    run,
    start,
    until,
    wait_for,
    write,
)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", PROMPTS)
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_is_status_130_and_keeps_what_has_finished(folder, number):
    write(folder / "in.jsonl", [{"prompt": "abc"}] * 3 + [{"prompt": "x" * 5000}] * 9)
    job = start(folder, "in.jsonl", "-o", "out", "--max-tokens", "9999", GRACE_S="0.5")
    part = folder / "out.part"
    wait_for(lambda: part.exists() and part.read_bytes().count(b"\n") == 4)
    job.send_signal(number)
    if number == signal.SIGINT:  # the first lets the long ones go on
        assert b"finishing 4 running requests; Ctrl-C again stops now" in until(
            job.stderr, b"stops now"
        )
        job.send_signal(number)
    output, errors = job.communicate(timeout=10)
    assert job.returncode == 130
    assert output == b""
    assert re.search(
        rb"interrupted\n3 finished records in .*/out.part; the same command goes on", errors
    )
    assert names(folder) == ["in.jsonl", "out.part"]
    assert [entry["record"]["text"] for entry in part_entries(folder)] == ["ABC"] * 3


def test_interrupted_finishes_what_runs_and_the_same_command_goes_on(folder):
    write(folder / "in.jsonl", [{"prompt": "abcdefgh"}] * 40)
    job = start(folder, "in.jsonl", "-o", "out")
    wait_for(lambda: part_entries(folder) if (folder / "out.part").exists() else False)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=10)
    assert job.returncode == 130
    assert b"finishing 4 running requests" in errors
    kept = len(part_entries(folder))
    assert 8 <= kept < 40
    assert kept % 4 == 0
    result = run(folder, "in.jsonl", "-o", "out", model="slow")
    assert result.returncode == 0
    assert b"resuming: %d records done" % kept in result.stderr
    assert len(lines((folder / "out").read_bytes())) == 40


def test_interrupted_while_waiting_for_standard_input(folder):
    job = start(folder, "-", "-o", "out")
    wait_for(lambda: (folder / "out.part").exists())
    time.sleep(0.3)
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    _, errors = job.communicate()
    assert b"interrupted" in errors
    assert b"Traceback" not in errors
    assert b"Fatal" not in errors
    assert names(folder) == ["in.jsonl"]


def test_closed_pipe_ends_the_job_without_a_traceback(folder):
    write(folder / "in.jsonl", [{"prompt": "abc"}] * 5000)
    command = " ".join([*COMMAND, "in.jsonl", "-m", "x", "2>err", "|", "head", "-1"])
    script = f"{command}; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, timeout=30)
    first, status = result.stdout.splitlines()
    assert orjson.loads(first)["text"] == "ABC"
    assert status == b"130"
    errors = (folder / "err").read_bytes()
    assert b"stopped: standard output was closed by its reader" in errors
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors


def test_a_job_outlives_the_reader_of_its_progress(folder):
    reader, writer = os.pipe()
    os.close(reader)
    job = subprocess.run([*COMMAND, "in.jsonl", "-m", "x"], cwd=folder, stdout=-1, stderr=writer)
    os.close(writer)
    assert job.returncode == 0
    assert len(lines(job.stdout)) == 6


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_statistics_that_cannot_be_written_are_status_3_with_the_records_in_place(folder):
    result = run(folder, "in.jsonl", "-o", "out", "--stats", "/dev/full")
    assert result.returncode == 3
    assert b"/dev/full failed: No space left on device (the records are com" in result.stderr
    assert result.stderr.endswith(b"6 finished records in %s/out\n" % bytes(folder))
    assert len(lines((folder / "out").read_bytes())) == 6


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_full_disk_is_status_3(folder):
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, "in.jsonl", "-m", "x"], cwd=folder, stdout=full, stderr=subprocess.PIPE
        )
    assert result.returncode == 3
    assert b"error: writing standard output failed: No space left on device" in result.stderr
    assert b"Traceback" not in result.stderr
