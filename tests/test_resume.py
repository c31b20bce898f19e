"""A job that was cut off goes on: what is kept, what is noticed, and a hundred kills."""

import contextlib
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from .test_cli_run import lines, names, run, start, wait_for, write

PROMPTS = [{"id": f"q{n}", "prompt": "abcdefgh"[: 1 + n % 8] * (1 + n % 3)} for n in range(12)]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", PROMPTS)
    return tmp_path


def cut(folder, *arguments, at="append:3", model="x"):
    """Run until the process kills itself."""
    result = run(
        folder, "in.jsonl", "-o", "out", *arguments, model=model, env={**os.environ, "KILL_AT": at}
    )
    assert result.returncode == -signal.SIGKILL, result.stderr


def results(path):
    """Records without their timing."""
    return [{k: v for k, v in r.items() if k != "timing"} for r in lines(path.read_bytes())]


def undisturbed(folder, *arguments, model="x"):
    assert run(folder, "in.jsonl", "-o", "whole", *arguments, model=model).returncode in (0, 1)
    return results(folder / "whole")


@pytest.mark.parametrize(
    "at",
    [
        "torn:1",
        "torn:4",
        "append:1",
        "append:7",
        "sync:1",
        "sync:4",
        "order:5",
        "rename:1",
        "rename:2",
    ],
)
def test_the_same_command_goes_on(folder, at):
    expected = undisturbed(folder)
    cut(folder, at=at)
    assert not (folder / "out").exists()
    kept = (folder / "out.part").read_bytes().count(b'"record"') - at.startswith("torn")
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 0, result.stderr
    assert results(folder / "out") == expected
    assert "out.part" not in names(folder)
    stats = orjson.loads((folder / "out.stats.json").read_bytes())
    assert stats["requests"]["total"] == 12
    # Those of a job that had made everything, and was cut off after them, stay.
    all_made = at in ("order:5", "rename:2")
    assert stats["requests"]["resumed"] == (0 if all_made else max(kept, 0))
    assert (b"resuming: %d record" % kept in result.stderr) == (kept > 0)


def test_a_kill_between_rename_and_removal_is_a_finished_job(folder):
    cut(folder, at="remove:1")
    assert names(folder) == ["in.jsonl", "out", "out.part", "out.stats.json"]
    stats = orjson.loads((folder / "out.stats.json").read_bytes())
    assert stats["requests"]["total"] == 12
    before = (folder / "out").read_bytes()
    assert run(folder, "in.jsonl", "-o", "out").returncode == 0
    assert (folder / "out").read_bytes() == before
    assert "out.part" not in names(folder)


def test_an_old_output_stays_until_the_resumed_job_replaces_it(folder):
    (folder / "out").write_text("old\n")
    cut(folder, "--overwrite")
    assert (folder / "out").read_text() == "old\n"
    assert run(folder, "in.jsonl", "-o", "out", "--overwrite").returncode == 0
    assert len(results(folder / "out")) == 12


def test_failed_records_are_kept_and_counted(folder):
    write(folder / "in.jsonl", [{"prompt": "refuse me"}, *PROMPTS[:6], {"promt": 1}])
    expected = undisturbed(folder)
    cut(folder, at="append:4")
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 1
    assert results(folder / "out") == expected
    assert b"2 failed" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "model", "message"),
    [
        (("--temperature", "0.5"), "x", "temperature was 0.0 and is 0.5"),
        (("--seed", "3"), "x", "seed was 0 and is 3"),
        (("--token-ids",), "x", "token_ids was False and is True"),
        ((), "y", "model was x and is y"),
        (("--max-tokens", "9", "--stop", "b"), "x", "max_tokens was 128 and is 9; stop was"),
    ],
)
def test_other_settings_are_refused_by_name(folder, arguments, model, message):
    cut(folder)
    before = (folder / "out.part").read_bytes()
    result = run(folder, "in.jsonl", "-o", "out", *arguments, model=model)
    assert result.returncode == 2
    assert message in result.stderr.decode()
    assert (folder / "out.part").read_bytes() == before
    forced = run(folder, "in.jsonl", "-o", "out", *arguments, "--resume", "force", model=model)
    assert forced.returncode == 0, forced.stderr
    assert len(results(folder / "out")) == 12


def test_whether_an_id_is_taken_is_asked_again_by_force(folder):
    """The verdict on a line's id comes from the lines before it, which may have changed."""
    ids = ["a", "b", "a", "c", "d"]
    write(folder / "in.jsonl", [{"id": name, "prompt": name} for name in ids])
    cut(folder, at="append:4")
    write(folder / "in.jsonl", [{"id": name, "prompt": "a"} for name in ["x", "c", "a", "c", "d"]])
    refused = run(folder, "in.jsonl", "-o", "out")
    assert refused.returncode == 2
    assert b"is not the line that" in refused.stderr
    assert run(folder, "in.jsonl", "-o", "out", "--resume", "force").returncode == 1
    records = results(folder / "out")
    assert [record.get("error", {}).get("type") for record in records] == [
        *[None] * 3,
        "duplicate_id",
        None,
    ]


def test_a_setting_that_decides_nothing_may_change(folder):
    expected = undisturbed(folder)
    cut(folder)
    assert run(folder, "in.jsonl", "-o", "out", "--max-rows", "2", "-q").returncode == 0
    assert results(folder / "out") == expected


def test_a_changed_line_is_refused_with_its_number_or_run_again(folder):
    cut(folder, at="append:12")
    changed = [dict(record) for record in PROMPTS]
    changed[4]["prompt"] = "other"
    write(folder / "in.jsonl", changed)
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 2
    assert "line 5 of in.jsonl is not the line" in result.stderr.decode()
    assert run(folder, "in.jsonl", "-o", "out", "--resume", "force").returncode == 0
    records = results(folder / "out")
    assert len(records) == 12
    assert records[4]["text"] == "OTHER"
    assert "out.part" not in names(folder)


def test_spelling_of_a_line_does_not_matter(folder):
    cut(folder, at="append:6")
    respelt = b"".join(
        b" " + orjson.dumps(dict(reversed(record.items())), option=orjson.OPT_INDENT_2).replace(
            b"\n", b""
        ) + b"\r\n\n"
        for record in PROMPTS
    )  # fmt: skip
    (folder / "in.jsonl").write_bytes(respelt)
    assert run(folder, "in.jsonl", "-o", "out").returncode == 0
    assert len(results(folder / "out")) == 12


def test_a_shorter_input_is_noticed(folder):
    cut(folder, at="append:12")
    write(folder / "in.jsonl", PROMPTS[:5])
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 2
    assert "holds a record of line index 11, but the input has 5 lines" in result.stderr.decode()
    assert (folder / "out.part").exists()


def test_standard_input_given_again(folder):
    stream = (folder / "in.jsonl").read_bytes()
    killed = run(folder, "-", "-o", "out", input=stream, env={**os.environ, "KILL_AT": "append:5"})
    assert killed.returncode == -signal.SIGKILL
    expected = undisturbed(folder)
    assert run(folder, "-", "-o", "out", input=stream).returncode == 0
    assert results(folder / "out") == expected


@pytest.mark.parametrize("killed_at", [None, "append:2", "append:5", "order:3", "rename:1"])
def test_errors_of_a_finished_output_are_retried(folder, killed_at):
    broken = [*PROMPTS[:3], {"id": "late", "prompt": "refuse me"}, *PROMPTS[3:6]]
    write(folder / "in.jsonl", broken)
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    before = (folder / "out").read_bytes()
    broken[3]["prompt"] = "mended"
    write(folder / "in.jsonl", broken)
    if killed_at:
        cut(folder, "--retry-errors", at=killed_at)
        assert (folder / "out").read_bytes() == before
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors")
    assert result.returncode == 0, result.stderr
    after = lines((folder / "out").read_bytes())
    assert after[3]["text"] == "MENDED"
    kept = [record for record in lines(before) if "error" not in record]
    assert [record for record in after if record["id"] != "late"] == kept  # not made again
    assert "out.part" not in names(folder)


def test_errors_of_a_part_are_retried(folder):
    write(folder / "in.jsonl", [{"prompt": "refuse me"}, *PROMPTS[:5]])
    cut(folder, at="append:3")
    write(folder / "in.jsonl", [{"prompt": "mended"}, *PROMPTS[:5]])
    assert run(folder, "in.jsonl", "-o", "out", "--retry-errors").returncode == 0
    assert results(folder / "out")[0]["text"] == "MENDED"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--n", "3"], "n was 1 and is 3"),
        (["--seed", "7"], "seed was 0 and is 7"),
        (["--max-tokens", "4"], "max_tokens was 128 and is 4"),
        (["--stop", "E"], "stop was [] and is ['E']"),
        (["--token-ids"], "token_ids was False and is True"),
        (["--on-too-long", "truncate-left"], "on_too_long was error and is truncate-left"),
    ],
)
def test_errors_are_retried_with_the_settings_of_their_job(folder, option, message):
    write(folder / "in.jsonl", [*PROMPTS[:3], {"id": "late", "prompt": "refuse me"}])
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    retry = ("in.jsonl", "-o", "out", "--retry-errors", *option)
    fine = {**os.environ, "REFUSE": "nothing"}
    result = run(folder, *retry, env=fine)
    assert result.returncode == 2
    assert f"out was made with other settings: {message} (" in result.stderr.decode()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run(folder, *retry, "--resume", "force", env=fine).returncode == 0
    assert not any("error" in record for record in results(folder / "out"))


@pytest.mark.parametrize("statistics", [None, b"{torn", b'{"settings":3}', b"[]"])
def test_errors_are_retried_where_nothing_tells_the_settings(folder, statistics):
    write(folder / "in.jsonl", [*PROMPTS[:3], {"id": "late", "prompt": "refuse me"}])
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    (folder / "out.stats.json").unlink()
    if statistics is not None:
        (folder / "out.stats.json").write_bytes(statistics)
    fine = {**os.environ, "REFUSE": "nothing"}
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors", env=fine)
    assert result.returncode == 0
    assert b"out.stats.json does not say which settings out was made with" in result.stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("none", "there is no none whose errors could be retried"),
        ("-", "cannot be retried: it is no file"),
        ("foreign", "line 1 of .*foreign is no output record"),
    ],
)
def test_nothing_to_retry(folder, output, message):
    (folder / "foreign").write_text("mine\n")
    result = run(folder, "in.jsonl", "-o", output, "--retry-errors")
    assert result.returncode == 2
    assert re.search(message, result.stderr.decode())
    assert names(folder) == ["foreign", "in.jsonl"]
    assert (folder / "foreign").read_text() == "mine\n"


def test_never_starts_anew(folder):
    cut(folder)
    arguments = ("in.jsonl", "-o", "out", "--resume", "never", "--temperature", "0.5")
    result = run(folder, *arguments)
    assert result.returncode == 0
    assert b"resuming" not in result.stderr


def test_a_damaged_part_is_named_with_its_line(folder):
    cut(folder)
    part = folder / "out.part"
    damaged = part.read_bytes().splitlines(keepends=True)
    damaged[1] = b"{torn\n"
    part.write_bytes(b"".join(damaged))
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 2
    assert "out.part is damaged in line 2" in result.stderr.decode()
    assert part.read_bytes() == b"".join(damaged)


def test_two_jobs_never_write_one_output(folder):
    write(folder / "in.jsonl", [{"prompt": "x" * 5000}])
    first = start(folder, "in.jsonl", "-o", "out", "--max-tokens", "9999")
    wait_for(lambda: (folder / "out.part").exists() and (folder / "out.part").stat().st_size)
    second = run(folder, "in.jsonl", "-o", "out")
    assert second.returncode == 2
    assert b"is being written by another job" in second.stderr
    first.kill()
    first.communicate()
    # The lock dies with its owner.
    with (folder / "out.part").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("at", ["append:1", "torn:5", "append:8", "order:11", "rename:1"])
def test_samples_go_on_one_by_one(folder, at):
    write(folder / "in.jsonl", [*PROMPTS[:3], {"prompt": "refuse me"}, PROMPTS[3] | {"n": 1}])
    expected = undisturbed(folder, "--n", "3")
    cut(folder, "--n", "3", at=at)
    finished = [
        (entry["index"], entry["sample"])
        for entry in lines((folder / "out.part").read_bytes().rpartition(b"\n")[0])
        if "record" in entry
    ]
    result = run(folder, "in.jsonl", "-o", "out", "--n", "3")
    assert result.returncode == 1, result.stderr
    got = results(folder / "out")
    assert got == expected
    assert [r.get("sample") for r in got] == [0, 1, 2, 0, 1, 2, 0, 1, 2, None, None]
    stats = orjson.loads((folder / "out.stats.json").read_bytes())
    # Statistics that were there already, of the run that made everything, stay.
    all_made = at.startswith("order")
    assert stats["requests"]["resumed"] == (0 if all_made else len(set(finished)))


def test_a_changed_line_with_fewer_samples_leaves_none_of_the_old(folder):
    write(folder / "in.jsonl", [PROMPTS[5], PROMPTS[6] | {"n": 3}, PROMPTS[7]])
    cut(folder, at="append:5")
    write(folder / "in.jsonl", [PROMPTS[5], {"prompt": "other", "n": 2}, PROMPTS[7]])
    for _ in range(2):  # cut off while it runs again, too
        cut(folder, "--resume", "force", at="append:1")
    assert run(folder, "in.jsonl", "-o", "out", "--resume", "force").returncode == 0
    texts = [(r["index"], r["text"]) for r in results(folder / "out") if r["index"] == 1]
    assert texts == [(1, "OTHER"), (1, "OTHER1")]
    assert len(results(folder / "out")) == 4


def test_records_as_they_finish(folder):
    expected = undisturbed(folder)
    cut(folder, "--no-ordered", at="append:4")
    # Which of several requests finishes first depends on when each was read: here the last did.
    header, *entries = (folder / "out.part").read_bytes().splitlines(keepends=True)
    (folder / "out.part").write_bytes(b"".join([header, *reversed(entries)]))
    part = [entry["record"]["id"] for entry in lines((folder / "out.part").read_bytes())[1:]]
    assert run(folder, "in.jsonl", "-o", "out", "--no-ordered").returncode == 0
    got = results(folder / "out")
    assert [record["id"] for record in got[: len(part)]] == part
    assert sorted(got, key=lambda record: record["index"]) == expected
    assert got != expected


def test_duplicates_are_the_same_after_a_resume(folder):
    write(folder / "in.jsonl", [*PROMPTS[:5], PROMPTS[1], PROMPTS[4], *PROMPTS[5:8]])
    expected = undisturbed(folder)
    assert sum("error" in record for record in expected) == 2
    for at in ("append:2", "append:2", "append:3"):
        cut(folder, at=at)
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    assert results(folder / "out") == expected


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    """Killed at every kind of moment, the job ends with the records of an undisturbed run."""
    draw = random.Random(0)
    count = 420
    prompts = ["".join(draw.choices("abcdefgh", k=1 + n % 9)) for n in range(count)]
    prompts[7::29] = ["refuse me"] * len(prompts[7::29])
    samples = [3 if n % 10 == 4 else 1 for n in range(count)]
    write(
        tmp_path / "in.jsonl",
        [{"prompt": prompt, "n": n} for prompt, n in zip(prompts, samples, strict=True)],
    )
    expected = undisturbed(tmp_path, "--temperature", "0.7", "--seed", "5", model="slow")
    arguments = ("in.jsonl", "-o", "out", "--temperature", "0.7", "--seed", "5")
    points = [f"{draw.choice(['append', 'torn', 'sync'])}:{draw.randint(2, 6)}" for _ in range(90)]
    points += ["rename:1", "rename:2", "order:1", "order:7", "order:400", "rename:1"]
    for place in range(5, 60, 5):
        points.insert(place, "any moment")
    points.append("remove:1")
    between = 0
    for point in points:
        if point == "any moment":
            job = start(tmp_path, *arguments, model="slow")
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=draw.uniform(0.1, 0.6))
            job.kill()
            job.communicate()
            status = job.returncode
        else:
            status = run(
                tmp_path, *arguments, env={**os.environ, "KILL_AT": point}, model="slow"
            ).returncode
        assert status == -signal.SIGKILL, point
        begun = (tmp_path / "out.part").read_bytes()
        between += b'"record"' in begun and not (tmp_path / "out").exists()
    assert len(points) >= 100
    assert between >= 80
    assert run(tmp_path, *arguments, model="slow").returncode == 1
    assert results(tmp_path / "out") == expected
    assert "out.part" not in names(tmp_path)


@pytest.mark.slow
def test_the_real_engine_killed_now_and_then(tmp_path):
    """Tokens, depths and log-probabilities are those of an undisturbed run.

    One request at a time: what shares a batch moves FP32 log-probabilities by a few 1e-5.
    """
    draw = random.Random(1)
    samples = Path(__file__).parents[1] / "samples"
    prompts = lines((samples / "prompts.jsonl").read_bytes())
    write(tmp_path / "in.jsonl", [{**prompt, "max_tokens": 40} for prompt in prompts])
    command = [sys.executable, "-m", "ouro_batch", "run", "in.jsonl", "-q"]
    command += ["-m", str(samples / "tiny-ouro"), "--logprobs", "2", "--n", "2", "--ignore-eos"]
    command += ["--temperature", "0.9", "--exit-threshold", "0.6", "--schedule", "serial"]
    assert subprocess.run([*command, "-o", "whole"], cwd=tmp_path).returncode == 0
    part = tmp_path / "out.part"

    def records():
        return part.read_bytes().count(b'"record"') if part.exists() else 0

    kills = 0
    while not (tmp_path / "out").exists():
        job = subprocess.Popen([*command, "-o", "out"], cwd=tmp_path)
        enough = records() + draw.randint(1, 20)
        while job.poll() is None and records() < enough:
            time.sleep(0.01)
        kills += job.poll() is None
        job.kill()
        job.wait()
        assert job.returncode in (0, -signal.SIGKILL)
    assert kills >= 4
    for got, expected in zip(results(tmp_path / "out"), results(tmp_path / "whole"), strict=True):
        ours, theirs = got.pop("logprobs"), expected.pop("logprobs")
        assert got == expected
        for entry, same in zip(ours, theirs, strict=True):
            assert entry["logprob"] == pytest.approx(same["logprob"], abs=1e-5)
            assert [top["token_id"] for top in entry["top"]] == [
                top["token_id"] for top in same["top"]
            ]
