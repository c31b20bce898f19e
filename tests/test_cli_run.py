"""``ouro-batch run`` as a user runs it, in a process of its own, with a fake LLM."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from ouro_batch.cli import app

TINY_OURO = Path(__file__).parents[1] / "samples" / "tiny-ouro"
COMMAND = [sys.executable, str(Path(__file__).with_name("fake_cli.py")), "run"]
PROMPTS = [{"id": f"q{n}", "prompt": "abcdefgh"[: 8 - n]} for n in range(6)]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", PROMPTS)
    return tmp_path


def write(path, records):
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))


def lines(data):
    return [orjson.loads(line) for line in data.splitlines()]


def run(folder, *arguments, model="x", **options):
    return subprocess.run(
        [*COMMAND, *arguments, "-m", model],
        cwd=folder,
        capture_output=True,
        timeout=30,
        **options,
    )


def start(folder, *arguments, model="slow", **variables):
    # Where the tests themselves run in the background, Ctrl-C would be ignored.
    return subprocess.Popen(
        [*COMMAND, *arguments, "-m", model],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def until(stream, text):
    """What a stream gives, line by line, to the line that holds ``text``."""
    seen = b""
    while text not in seen:
        line = stream.readline()
        assert line, seen
        seen += line
    return seen


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_done_is_status_0_with_records_in_input_order(folder):
    result = run(folder, "in.jsonl", "-o", "out.jsonl")
    assert result.returncode == 0, result.stderr
    assert result.stdout == b""
    records = lines((folder / "out.jsonl").read_bytes())
    assert [record["id"] for record in records] == [f"q{n}" for n in range(6)]
    assert [record["index"] for record in records] == list(range(6))
    assert records[0]["text"] == "ABCDEFGH"
    assert "token_ids" not in records[0]
    assert names(folder) == ["in.jsonl", "out.jsonl", "out.jsonl.stats.json"]


def test_some_failed_is_status_1(folder):
    with (folder / "in.jsonl").open("ab") as file:
        file.write(b'\n{"id": "bad", "promt": "x"}\nnot json\n')
    result = run(folder, "in.jsonl", "-o", "out.jsonl")
    assert result.returncode == 1
    records = lines((folder / "out.jsonl").read_bytes())
    assert len(records) == 8
    assert set(records[6]) == {"id", "index", "error"}
    assert records[6]["id"] == "bad"
    assert records[6]["error"]["type"] == "invalid_request"
    assert records[6]["error"]["line"] == 8
    assert records[7]["id"] is None
    assert b"2 failed (1 invalid_request, 1 invalid_json)" in result.stderr
    quiet = run(folder, "in.jsonl", "-o", "again.jsonl", "--quiet")
    assert quiet.stderr.startswith(b"2 records failed, the first in line 8 of in.jsonl: ")
    assert quiet.stderr.count(b"\n") == 1


def test_settings_without_effect_are_said(folder):
    arguments = ["in.jsonl", "-o", "out", "--min-loops", "5", "--max-loops", "9", "--n", "2"]
    errors = run(folder, *arguments).stderr.decode()
    assert "note: --min-loops 5 is above the model's 4 loops" in errors
    assert "note: --max-loops 9 is above the model's 4 loops" in errors
    assert "note: --n 2 at --temperature 0 gives the same answer every time" in errors
    arguments = ["in.jsonl", "-o", "other", "--max-loops", "4", "--n", "2", "--temperature", "1"]
    assert b"note" not in run(folder, *arguments).stderr


@pytest.mark.parametrize("command", ["run", "check", "score"])
def test_columns_without_effect_are_said(folder, command):
    (folder / "text").write_text("1 + 2\n")
    write(folder / "out", [{"id": 0, "index": 0, "error": {"type": "x", "message": "x"}}])
    fields = ["--format", "text", "--prompt-field", "q", "--id-field", "n"]
    arguments = [command, str(folder / "text"), "-m", str(TINY_OURO), *fields]
    arguments += {
        "run": ["--max-tokens", "1", "-o", str(folder / "made")],
        "score": ["--answers", str(folder / "out"), "-o", str(folder / "made")],
        "check": ["--max-tokens", "1"],
    }[command]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (command == "score"), result.stderr
    for option in ("--prompt-field q", "--id-field n"):
        assert f"note: {option} changes nothing with --format text" in result.stderr
    if command != "check":
        again = CliRunner().invoke(app, [*arguments, "--overwrite", "--quiet"])
        assert "note" not in again.stderr


@pytest.mark.parametrize("command", ["run", "check", "score"])
def test_a_column_that_is_to_be_prompt_and_id(folder, command):
    result = subprocess.run(
        [*COMMAND[:-1], command, "in.jsonl", "-m", "x", "--prompt-field", "q", "--id-field", "q"],
        cwd=folder,
        capture_output=True,
    )
    assert result.returncode == 2
    assert b"--prompt-field and --id-field both name 'q'" in result.stderr


def test_standard_output_streams_records_and_nothing_else(folder):
    # Shorter answers finish first: the long one leaves the others seconds to be read in.
    write(folder / "in.jsonl", [{"prompt": "A" * 100}, *PROMPTS[1:]])
    result = run(folder, "in.jsonl", "--token-ids", model="slow")
    assert result.returncode == 0
    records = lines(result.stdout)
    assert [record["index"] for record in records] != sorted(r["index"] for r in records)
    assert sorted(record["index"] for record in records) == list(range(6))
    assert records[0]["token_ids"][0] == 65
    assert b"6 done" in result.stderr
    assert names(folder) == ["in.jsonl"]


def test_standard_input_answers_before_it_ends(folder):
    job = start(folder, "-", "-o", "-", "--quiet", model="x")
    job.stdin.write(b'{"prompt": "first"}\n')
    job.stdin.flush()
    assert orjson.loads(job.stdout.readline())["text"] == "FIRST"
    rest, errors = job.communicate(b'{"prompt": "second"}')
    assert [record["text"] for record in lines(rest)] == ["SECOND"]
    assert errors == b""
    assert job.returncode == 0


def test_several_inputs_count_on_and_name_the_failing_file(folder):
    (folder / "more.jsonl").write_bytes(b'{"prompt": "x"}\n{}\n')
    result = run(folder, "in.jsonl", "more.jsonl", "-", "-o", "out", input=b'{"prompt": "y"}')
    assert result.returncode == 1
    records = lines((folder / "out").read_bytes())
    assert [record["index"] for record in records] == list(range(9))
    assert records[7]["error"]["file"] == "more.jsonl"
    assert records[7]["error"]["line"] == 2
    assert records[8]["text"] == "Y"


def test_empty_input_is_an_empty_output(folder):
    (folder / "in.jsonl").write_bytes(b"\n\n")
    result = run(folder, "in.jsonl", "-o", "out", "--quiet")
    assert result.returncode == 0
    assert (folder / "out").read_bytes() == b""
    assert result.stderr == b"no records: there are no lines in in.jsonl\n"


@pytest.mark.parametrize("name", ["out.gz", "out.jsonl.zst", "out.parquet"])
@pytest.mark.parametrize("command", ["run", "score"])
def test_outputs_are_not_compressed(folder, command, name):
    cli = [sys.executable, COMMAND[1], command]
    result = subprocess.run(
        [*cli, "in.jsonl", "-m", "x", "-o", name], cwd=folder, capture_output=True, timeout=30
    )
    assert result.returncode == 2
    assert f"cannot write {name}: records are plain JSONL".encode() in result.stderr
    assert not (folder / name).exists()


def test_options_reach_sampling_and_engine(folder):
    arguments = ["--max-tokens", "3", "--stop", "u", "--stop", "v", "--stop-token-id", "7"]
    arguments += ["--seed", "4", "--max-rows", "2", "--schedule", "serial", "--exit-threshold", "1"]
    assert run(folder, "in.jsonl", "-o", "out", *arguments).returncode == 0
    records = lines((folder / "out").read_bytes())
    assert [record["usage"]["completion_tokens"] for record in records] == [3] * 6
    assert [record["seed"] for record in records] == [4000 + n for n in range(6)]
    stats = orjson.loads((folder / "out.stats.json").read_bytes())
    sampling = stats["options"]["sampling"]
    assert sampling["stop"] == ["u", "v"]
    assert sampling["stop_token_ids"] == [7]
    assert sampling["exit_threshold"] == 1.0
    assert stats["schedule"] == "serial"
    assert stats["max_rows"] == 2


def test_statistics_beside_the_output(folder):
    run(folder, "in.jsonl", "-o", "out.jsonl")
    stats = orjson.loads((folder / "out.jsonl.stats.json").read_bytes())
    records = lines((folder / "out.jsonl").read_bytes())
    depths = [depth for record in records for depth in record["exit_depths"][1:]]
    assert stats["exit_depth"]["mean"] == pytest.approx(sum(depths) / len(depths))
    assert stats["exit_depth"]["histogram"] == {
        str(depth): depths.count(depth) for depth in sorted(set(depths))
    }
    assert stats["requests"]["ok"] == 6
    assert stats["tokens"]["completion"] == sum(r["usage"]["completion_tokens"] for r in records)
    assert stats["tokens_per_second"]["completion"] > 0
    assert stats["model"]["revision"] == "f" * 40
    assert {"python", "torch", "ouro-batch"} <= set(stats["versions"])
    assert {"rows_in_use", "cache", "peak_memory_bytes"} <= set(stats["engine"])
    assert stats["device"] == "cpu (fake)"
    assert stats["options"]["inputs"] == ["in.jsonl"]


def test_statistics_of_a_stream_where_asked_for(folder):
    assert run(folder, "in.jsonl", "--stats", "s.json").returncode == 0
    assert orjson.loads((folder / "s.json").read_bytes())["requests"]["total"] == 6


def test_progress_without_a_terminal_is_plain_lines(folder):
    result = run(folder, "in.jsonl", "-o", "out")
    assert b"running 6 requests: x on cpu (fake), refill, 4 loops\n" in result.stderr
    assert b"\x1b" not in result.stderr


def test_quiet_says_nothing_but_errors(folder):
    result = run(folder, "in.jsonl", "-o", "out", "--quiet")
    assert (result.stdout, result.stderr) == (b"", b"")
    result = run(folder, "in.jsonl", "-o", "out", "--quiet")
    assert result.returncode == 2
    assert b"out exists" in result.stderr


def test_preview_shows_first_answers(folder):
    result = run(folder, "in.jsonl", "-o", "out", "--preview", "2")
    assert b"    ABCDEFGH\n    43412341\n" in result.stderr
    assert b"    ABCDEFG\n" in result.stderr
    assert b"    ABCDEF\n" not in result.stderr
    assert b"ABCDEFGH" not in run(folder, "in.jsonl", "-o", "out2").stderr


def test_a_terminal_gets_the_live_display_and_a_coloured_preview(folder):
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    job = subprocess.Popen(
        [*COMMAND, "in.jsonl", "-m", "slow", "-o", "out"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=end,
    )
    os.close(end)
    screen = b""
    with suppress(OSError):  # Linux says EIO where the other side has closed
        while chunk := os.read(terminal, 65536):
            screen += chunk
    os.close(terminal)
    assert job.communicate()[0] == b""
    assert job.returncode == 0
    assert b"mean exit depth" in screen
    assert b"rows" in screen
    assert re.search(rb"\x1b\[[0-9;]*48;5;\d+mA", screen), screen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.jsonl", "-o", "out"], "cannot read gone.jsonl: No such file"),
        (["in.jsonl", "-o", "in.jsonl", "--overwrite"], "in.jsonl is an input too"),
        (["in.jsonl", "-o", "no/such/out"], "there is no folder"),
        (["in.jsonl", "-o", "."], "it is a folder"),
        (["in.jsonl", "-o", "/proc/out"], "cannot write /proc/out"),
        (["in.jsonl", "-o", "old"], "old exists (give --overwrite"),
        (["in.jsonl", "-o", "torn"], "torn.part is no file of ouro-batch (move it away"),
    ],
)
def test_wrong_use_is_status_2_before_the_model_is_loaded(folder, arguments, message):
    (folder / "old").write_text("old\n")
    (folder / "torn.part").write_text("torn\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = run(folder, *arguments, model="missing")
    assert result.returncode == 2
    assert message in result.stderr.decode()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_appending_to_the_input_is_refused(folder):
    with (folder / "in.jsonl").open("ab") as out:
        result = subprocess.run(
            [*COMMAND, "in.jsonl", "-m", "x"], cwd=folder, stdout=out, stderr=subprocess.PIPE
        )
    assert result.returncode == 2
    assert b"input too" in result.stderr


def test_overwrite_replaces(folder):
    (folder / "out").write_text("old\n")
    (folder / "out.part").write_text("old\n")
    assert run(folder, "in.jsonl", "-o", "out", "--overwrite").returncode == 2
    arguments = ("in.jsonl", "-o", "out", "--overwrite", "--resume", "never")
    assert run(folder, *arguments, model="missing").returncode == 3
    assert (folder / "out.part").read_text() == (folder / "out").read_text() == "old\n"
    assert run(folder, *arguments).returncode == 0
    assert len(lines((folder / "out").read_bytes())) == 6
    assert "out.part" not in names(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(folder):
    (folder / "locked").mkdir(mode=0o500)
    result = run(folder, "in.jsonl", "-o", "locked/out")
    assert result.returncode == 2
    assert b"not writable" in result.stderr


def part_entries(folder):
    """The records of out.part, without its header."""
    return lines((folder / "out.part").read_bytes())[1:]


@pytest.mark.parametrize("model", ["missing", "no-device"])
def test_an_engine_that_cannot_run_is_status_3_and_leaves_nothing(folder, model):
    result = run(folder, "in.jsonl", "-o", "out", model=model)
    assert result.returncode == 3
    assert result.stderr.decode().splitlines()[-1].startswith("error: ")
    assert names(folder) == ["in.jsonl"]


def test_an_engine_that_breaks_keeps_what_has_finished(folder):
    write(folder / "in.jsonl", [{"prompt": "ab"}, {"prompt": "abcdefgh"}])
    result = run(folder, "in.jsonl", "-o", "out", model="breaks")
    assert result.returncode == 3
    assert b"error: the engine stopped: out of memory" in result.stderr
    assert b"1 finished record in" in result.stderr
    assert names(folder) == ["in.jsonl", "out.part"]
    assert [entry["record"]["text"] for entry in part_entries(folder)] == ["AB"]


def test_a_program_error_is_not_mistaken_for_failed_records(folder):
    script = (
        "import sys, tests.fake_cli as f\n"
        "f.FakeLLM.step = lambda self: 1 / 0\n"
        "sys.argv = ['ouro-batch', 'run', 'in.jsonl', '-m', 'x', '-o', 'out']\n"
        "from ouro_batch.cli import main\n"
        "main()\n"
    )
    root = str(Path(__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
    )
    assert result.returncode == 3
    assert b"ZeroDivisionError" in result.stderr
    assert names(folder) == ["in.jsonl"]


def test_a_device_as_output_streams(folder):
    assert run(folder, "in.jsonl", "-o", "/dev/null").returncode == 0
    assert not os.path.isfile("/dev/null")
    assert names(folder) == ["in.jsonl"]


def test_the_real_engine_on_a_random_checkpoint(tmp_path):
    from tests.tiny import write_checkpoint

    write_checkpoint(tmp_path / "model")
    write(tmp_path / "in.jsonl", [{"prompt": [5 + n, 7, 9]} for n in range(5)] + [{"prompt": "a"}])
    command = [sys.executable, "-m", "ouro_batch", "run", "in.jsonl", "-m", "model", "-o", "out"]
    command += ["--exit-threshold", "0.5", "--max-tokens", "6", "--ignore-eos", "--token-ids"]
    command += ["--device", "cpu", "--kv-tokens", "512", "--preview", "3"]
    root = str(Path(__file__).parents[1])
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True
    )
    assert result.returncode == 1, result.stderr
    assert b"Traceback" not in result.stderr
    records = lines((tmp_path / "out").read_bytes())
    assert [len(record["token_ids"]) for record in records[:5]] == [6] * 5
    assert all(record["exit_depths"][0] == 3 for record in records[:5])
    assert "tokenizer" in records[5]["error"]["message"]
    stats = orjson.loads((tmp_path / "out.stats.json").read_bytes())
    # What the job counted from its records is what the engine counted.
    assert stats["exit_depth"]["mean"] == pytest.approx(stats["engine"]["mean_exit_depth"])
    assert stats["tokens"]["completion"] == stats["engine"]["completion_tokens"] == 30
    assert stats["model"]["config"]["loops"] == 3
