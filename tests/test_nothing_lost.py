"""Files and lines that an attack on batch jobs lost, mixed up or computed twice."""

import os
import shlex
import stat
import subprocess
import sys

import orjson
import pytest

from ouro_batch.jobs.errors import FileError
from ouro_batch.jobs.part import PartFile
from ouro_batch.jobs.reader import TEMPORARY
from ouro_batch.jobs.writer import FileWriter

from .test_cli_input import TINY_OURO
from .test_cli_run import COMMAND, lines, names, run, write
from .test_resume import cut, results

LINES = [{"id": f"q{n}", "prompt": f"abc {n}"} for n in range(6)]
TINY = str(TINY_OURO)
DEEP = [1]
for _ in range(300):
    DEEP = [DEEP]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", LINES)
    return tmp_path


def failed(folder, count=1):
    """A finished job in which the lines after the third failed."""
    broken = [{"id": f"bad{n}", "prompt": "refuse me"} for n in range(count)]
    write(folder / "in.jsonl", [*LINES[:3], *broken, *LINES[3:]])
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    return results(folder / "out")


def test_a_retry_with_other_lines_is_refused(folder):
    failed(folder)
    before = (folder / "out").read_bytes()
    write(folder / "in.jsonl", [*LINES, {"id": "new", "prompt": "brand new"}])
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors")
    assert result.returncode == 2
    assert b"line 5 of in.jsonl is not the line" in result.stderr
    assert (folder / "out").read_bytes() == before


def test_a_retry_that_drops_what_was_answered_is_refused(folder):
    failed(folder)
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors", "--resume", "never")
    assert result.returncode == 2
    assert b"give one of them" in result.stderr
    assert "out.part" not in names(folder)


@pytest.mark.parametrize("at", ["append:1", "append:4", "sync:1", "order:3"])
def test_a_retry_that_was_cut_off_runs_nothing_twice(folder, at):
    expected = failed(folder)
    cut(folder, "--retry-errors", at=at)
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 1
    assert results(folder / "out") == expected
    counted = orjson.loads((folder / "out.stats.json").read_bytes())["requests"]
    assert counted["resumed"] >= 6


@pytest.mark.parametrize("openai", [False, True])
def test_an_error_and_samples_of_one_line_never_both_count(folder, openai):
    """The error of a retry that was cut off after one of the line's samples."""
    body = {"prompt": "refuse me", "n": 3}
    line = {"id": "b", **body}
    if openai:
        line = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": body}
    write(folder / "in.jsonl", [line, *LINES])
    assert run(folder, "in.jsonl", "-o", "out", "--max-errors", "1").returncode == 1
    fine = {**os.environ, "REFUSE": "nothing"}
    result = run(
        folder,
        *("in.jsonl", "-o", "out", "--retry-errors"),
        env={**fine, "KILL_AT": "append:2"},
    )
    assert result.returncode < 0
    assert run(folder, "in.jsonl", "-o", "out", env=fine).returncode == 0
    got = lines((folder / "out").read_bytes())
    assert not any(record.get("error") for record in got)
    assert len(got) == len(LINES) + (1 if openai else 3)


def test_an_output_of_score_is_no_job_to_retry(folder):
    write(folder / "out", [{"id": "a", "index": 0, "logprob": -1.0, "token_ids": [1]}])
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors")
    assert result.returncode == 2
    assert b"line 1 of" in result.stderr
    assert b"no output record of ouro-batch run" in result.stderr


def test_retrying_a_job_that_was_to_replace_an_output_takes_nothing_from_that(folder):
    assert run(folder, "in.jsonl", "-o", "out", "--max-tokens", "1").returncode == 0
    arguments = ["in.jsonl", "-o", "out", "--max-tokens", "4"]
    run(folder, *arguments, "--overwrite", env={**os.environ, "KILL_AT": "append:1"})
    assert run(folder, *arguments, "--retry-errors").returncode == 0
    assert run(folder, *arguments[:2], "whole", *arguments[3:]).returncode == 0
    texts = [[r["text"] for r in lines((folder / name).read_bytes())] for name in ("out", "whole")]
    assert texts[0] == texts[1]


def test_samples_that_are_there_outlive_a_line_that_can_no_longer_be_run(folder):
    write(folder / "in.jsonl", [{"prompt": "refuse me", "n": 3}])
    killed = {**os.environ, "REFUSE": "nothing", "KILL_AT": "append:2"}
    run(folder, "in.jsonl", "-o", "out", env=killed)
    before = (folder / "out.part").read_bytes()
    refused = run(folder, "in.jsonl", "-o", "out")
    assert refused.returncode == 2
    assert b"can no longer be run" in refused.stderr
    assert (folder / "out.part").read_bytes() == before
    result = run(folder, "in.jsonl", "-o", "out", env={**os.environ, "REFUSE": "nothing"})
    assert result.returncode == 0
    assert len(lines((folder / "out").read_bytes())) == 3


@pytest.mark.parametrize("end", [TEMPORARY, ".part"])
def test_an_input_beside_what_a_link_points_to_is_kept(folder, end):
    (folder / "far").mkdir()
    (folder / "link").symlink_to("far/real")
    source = folder / "far" / f"real{end}"
    source.write_bytes((folder / "in.jsonl").read_bytes())
    result = run(folder, str(source), "-o", "link", "--resume", "never")
    assert result.returncode == 2
    assert b"is an input too" in result.stderr
    assert source.read_bytes() == (folder / "in.jsonl").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_job_outlives_a_full_log(folder):
    command = [*COMMAND, "in.jsonl", "-m", "x", "-o", "out"]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, cwd=folder, stderr=full).returncode == 0
    assert (folder / "out").exists()


def test_a_pattern_does_not_stand_for_the_job_itself(folder):
    arguments = ["*", "-o", "out"]
    cut = run(folder, *arguments, env={**os.environ, "KILL_AT": "append:2"})
    assert cut.returncode == -9, cut.stderr
    assert run(folder, *arguments).returncode == 0


def test_statistics_of_the_run_that_made_the_records_stay(folder):
    run(folder, "in.jsonl", "-o", "out", env={**os.environ, "KILL_AT": "rename:2"})
    made = (folder / "out.stats.json").read_bytes()
    for arguments in ([], ["--retry-errors"]):
        assert run(folder, "in.jsonl", "-o", "out", *arguments).returncode == 0
        assert (folder / "out.stats.json").read_bytes() == made


@pytest.mark.parametrize(
    "change", [{"index": -1}, {"sample": 5000}, {"sample": "x"}, {"usage": None}, {"index": None}]
)
def test_an_output_that_cannot_be_taken_up_is_refused_by_line(folder, change):
    assert run(folder, "in.jsonl", "-o", "out").returncode == 0
    record = {**lines((folder / "out").read_bytes())[0], **change}
    write(folder / "out", [{name: value for name, value in record.items() if value is not None}])
    before = (folder / "out").read_bytes()
    result = run(folder, "in.jsonl", "-o", "out", "--retry-errors")
    assert result.returncode == 2
    assert b"line 1 of" in result.stderr
    assert (folder / "out").read_bytes() == before


def test_a_header_that_says_too_little(folder):
    (folder / "out.part").write_bytes(b'{"ouro_batch_part":2}\n')
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 2
    assert b"is no file of ouro-batch" in result.stderr


def test_statistics_to_standard_output(folder):
    for name in ("-", "/dev/stdout"):
        result = run(folder, "in.jsonl", "-o", "out", "--overwrite", "--stats", name)
        assert result.returncode == 0, result.stderr
        assert b'"requests"' in result.stdout
    assert not (folder / "-").exists()


@pytest.mark.parametrize("command", ["report", "bench"])
def test_what_is_no_earlier_result_is_not_replaced(folder, command):
    assert run(folder, "in.jsonl", "-o", "out").returncode == 0
    os.mkfifo(folder / "pipe")
    before = (folder / "in.jsonl").read_bytes()
    for name in ("pipe", "in.jsonl"):
        arguments = {
            "report": ["report", "out", "--html", name],
            "bench": ["bench", "--shape", "tiny", "-w", "1x4/2", "-o", name],
        }[command]
        refused = subprocess.run(
            [*COMMAND[:-1], *arguments], cwd=folder, capture_output=True, timeout=60
        )
        assert refused.returncode == 2, refused.stderr
        assert name.encode() in refused.stderr
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)
    assert (folder / "in.jsonl").read_bytes() == before


def test_a_retry_that_is_refused_leaves_nothing(folder):
    write(folder / "in.jsonl", [{"id": 2, "prompt": "a"}, {"id": 1, "prompt": "refuse me"}])
    assert run(folder, "in.jsonl", "-o", "out").returncode == 1
    write(folder / "in.jsonl", [{"id": 3, "prompt": "a"}, {"id": 1, "prompt": "refuse me"}])
    there = sorted(path.name for path in folder.iterdir())
    env = {**os.environ, "REFUSE": "nothing"}
    assert run(folder, "in.jsonl", "-o", "out", "--retry-errors", env=env).returncode == 2
    assert sorted(path.name for path in folder.iterdir()) == there


@pytest.mark.parametrize("name", ["loop", "n" * 300, "n" * 242, "n" * 253])
def test_an_output_that_no_file_can_be_is_refused(folder, name):
    """Nor what is beside it: the statistics and both files on their way."""
    (folder / "loop").symlink_to("loop")
    result = run(folder, "in.jsonl", "-o", name)
    assert result.returncode == 2
    assert b"cannot write %s" % name.encode() in result.stderr
    assert (folder / "loop").is_symlink()


def test_statistics_into_a_pipe_leave_it_a_pipe(folder):
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    result = run(folder, "in.jsonl", "-o", "out", "--stats", "pipe")
    assert result.returncode == 0, result.stderr
    assert orjson.loads(reader.communicate(timeout=30)[0])["requests"]["total"] == 6
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", [f"out{TEMPORARY}", "out.part", f"out.stats.json{TEMPORARY}"])
def test_an_input_where_a_file_of_the_job_would_be(folder, name):
    os.rename(folder / "in.jsonl", folder / name)
    result = run(folder, name, "-o", "out")
    assert result.returncode == 2
    assert b"is an input too" in result.stderr
    assert names(folder) == [name]


def test_a_file_of_somebody_else_beside_the_output(folder):
    for name in ("out.tmp", "out.stats.json.tmp"):
        (folder / name).write_bytes(b"my precious notes")
        (folder / name.replace(".tmp", TEMPORARY)).symlink_to(name)
    assert run(folder, "in.jsonl", "-o", "out").returncode == 0
    assert not (folder / "out").is_symlink()
    for name in ("out.tmp", "out.stats.json.tmp"):
        assert (folder / name).read_bytes() == b"my precious notes"
    assert len(results(folder / "out")) == 6


@pytest.mark.parametrize("name", ["out", "out.stats.json"])
def test_a_folder_where_a_file_on_its_way_would_be(folder, name):
    (folder / f"{name}{TEMPORARY}").mkdir()
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 2
    assert f"cannot write {name}{TEMPORARY}: it is a folder" in result.stderr.decode()
    assert "out.part" not in names(folder)


@pytest.mark.parametrize("content", [b"my precious notes", b"{}", b"notes\nmore", b'{"ouro_batch'])
def test_a_file_of_somebody_else_in_the_place_of_the_part(folder, content):
    (folder / "out.part").write_bytes(content)
    result = run(folder, "in.jsonl", "-o", "out")
    if b'{"ouro_batch_part":'.startswith(content):  # a header that was cut off
        assert result.returncode == 0
        return
    assert result.returncode == 2
    assert b"is no file of ouro-batch" in result.stderr
    assert (folder / "out.part").read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        {"id": "b", "messages": [{"role": "user", "content": DEEP}]},
        {
            "id": "b",
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"x": DEEP},
        },
        {"custom_id": "b", "url": DEEP, "body": {}},
        {"id": DEEP, "prompt": "x"},
        {"id": "b", "prompt": "x", "metadata": DEEP},
    ],
)
def test_a_value_that_is_nested_too_deeply_fails_its_line_alone(folder, line):
    import json

    text = "\n".join(json.dumps(own) for own in [LINES[0], line, LINES[1]])
    (folder / "in.jsonl").write_text(text)
    result = run(folder, "in.jsonl", "-o", "out")
    assert result.returncode == 1, result.stderr
    got = lines((folder / "out").read_bytes())
    assert len(got) == 3
    assert got[0]["text"]
    assert got[2]["text"]
    assert b"Traceback" not in result.stderr


def test_names_that_are_no_text(folder):
    odd = os.fsdecode(b"in\xff.jsonl")
    os.rename(folder / "in.jsonl", folder / odd)
    code = "from ouro_batch.cli import main; main()"
    for arguments in ([odd, "-o", "out"], ["in*.jsonl", "-o", "out"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "run", *arguments, "-m", "x"],
            cwd=folder,
            capture_output=True,
        )
        assert done.returncode == 2, done.stderr
        assert b"is not UTF-8" in done.stderr
        assert b"Traceback" not in done.stderr


def test_a_folder_whose_name_is_no_text(folder):
    """Not given by name, but where the job is: in settings and statistics it is written down."""
    odd = folder / os.fsdecode(b"odd\xff")
    (odd / "x").mkdir(parents=True)
    write(odd / "in.jsonl", [*LINES, {"id": "bad", "prompt": "refuse me"}])
    cut(odd, at="append:2")
    assert run(odd, "in.jsonl", "-o", "out").returncode == 1
    fine = {**os.environ, "REFUSE": "nothing"}
    done = run(odd, "in.jsonl", "-o", "out", "--retry-errors", env=fine)
    assert done.returncode == 0, done.stderr
    settings = orjson.loads((odd / "out.stats.json").read_bytes())["settings"]
    assert settings["model"].endswith("odd\\udcff/x")
    (folder / "link").symlink_to(odd / "x")
    assert run(folder, "in.jsonl", "-o", "out", model="link").returncode == 0


def test_a_cache_whose_name_is_no_text(folder):
    done = subprocess.run(
        [*COMMAND[:-1], "info", "--json"],
        capture_output=True,
        env={**os.environb, b"HF_HOME": os.fsencode(folder) + b"/odd\xff"},
    )
    assert done.returncode == 0, done.stderr
    assert "odd\\udcff" in orjson.loads(done.stdout)["hub_cache"]


def shell(folder, arguments, redirection):
    """Status and standard error of a command, through bash."""
    command = shlex.join([*COMMAND[:-1], *arguments])
    script = f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, timeout=60)
    assert b"Traceback" not in done.stderr
    return done.returncode, done.stderr.decode()


def test_closed_standard_files(folder):
    status, words = shell(folder, ["run", "in.jsonl", "-m", "x", "-o", "out"], ">&-")
    assert status == 0, words
    assert len(results(folder / "out")) == 6
    status, words = shell(folder, ["run", "-", "-m", "x", "-o", "other"], "<&-")
    assert status in (2, 3), words
    assert not (folder / "other").exists()
    closed = "ing standard {} failed: Bad file descriptor"
    status, words = shell(folder, ["report", "-"], "<&-")
    assert (status, words) == (3, f"error: read{closed.format('input')}\n")
    status, words = shell(folder, ["run", "in.jsonl", "-m", "x", "-q", "-o", "-"], ">&-")
    assert (status, words) == (3, f"error: writ{closed.format('output')}\n")
    status, words = shell(folder, ["run", "in.jsonl", "-m", "x", "-o", "third"], "2>&-")
    assert (status, words) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "out"],
        ["report", "out", "--json"],
        ["check", "in.jsonl", "-m", TINY],
        ["check", "in.jsonl", "-m", TINY, "--json"],
        ["fetch", TINY],
        ["fetch", TINY, "--json"],
        ["info", "--json"],
        ["--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_a_standard_output_that_takes_nothing(folder, arguments):
    """A reader that has gone is no error, a full disk is one, and so is a file that is closed."""
    if arguments[0] == "report":
        assert run(folder, "in.jsonl", "-o", "out").returncode == 0
    assert shell(folder, arguments, "| true") == (0, "")
    refused = [(">&-", "Bad file descriptor")]
    if os.path.exists("/dev/full"):
        refused.append((">/dev/full", "No space left on device"))
    for redirection, why in refused:
        said = f"error: writing standard output failed: {why}\n"
        assert shell(folder, arguments, redirection) == (3, said)


@pytest.mark.parametrize("name", [b"OURO_BATCH_RUN_MODEL", b"OURO_BATCH_RUN_M\xff"])
def test_variables_that_are_no_text(folder, name):
    for command in ("run", "score", "check"):
        done = subprocess.run(
            [*COMMAND[:-1], command, "in.jsonl", "-m", "x"],
            cwd=folder,
            capture_output=True,
            env={**os.environb, name: b"x\xff"},
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.endswith(b"is not UTF-8\n")
        assert b"OURO_BATCH_RUN_M" in done.stderr


def test_a_disk_that_is_full_before_the_first_record(folder, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PartFile, "_write", full)
    writer = FileWriter(str(folder / "out"))
    with pytest.raises(FileError, match=r"writing .*out\.part failed: No space left"):
        writer.begin({})


def test_a_pin_in_the_environment_is_no_option(folder):
    for value in ("0.1.0", "1"):
        result = run(
            folder, "in.jsonl", "-o", value, env={**os.environ, "OURO_BATCH_VERSION": value}
        )
        assert result.returncode == 0, result.stderr
        assert len(results(folder / value)) == 6
