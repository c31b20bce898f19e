"""What ``ouro-batch run`` takes as input: files, patterns, compression, text, foreign columns."""

import datetime
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_cli_run import lines, names, part_entries, run, write

TINY_OURO = Path(__file__).parents[1] / "samples" / "tiny-ouro"
PROMPTS = [{"id": f"q{n}", "prompt": "abcdefgh"[: 8 - n]} for n in range(6)]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in.jsonl", PROMPTS)
    return tmp_path


def test_compressed_files_and_patterns(folder):
    zstandard = pytest.importorskip("zstandard")
    (folder / "shards").mkdir()
    whole = (folder / "in.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "shards" / "1.jsonl").write_bytes(b"".join(whole[:2]))
    (folder / "shards" / "2.jsonl.gz").write_bytes(gzip.compress(b"".join(whole[2:4])))
    (folder / "shards" / "3.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, whole[4:])))
    result = run(folder, "shards/*", "-o", "out")
    assert result.returncode == 0, result.stderr
    assert b"6 requests" in result.stderr
    records = lines((folder / "out").read_bytes())
    assert [record["id"] for record in records] == [f"q{n}" for n in range(6)]
    assert b"no file matches none/*" in run(folder, "none/*").stderr


def test_parquet(folder):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table(
        {
            "question": ["ab", "cd", "ef"],
            "key": [7, 8, 9],
            "when": [datetime.date(2026, 12, day) for day in (1, 2, 3)],
            "n": arrow.array([None, 2, None], arrow.int32()),
        }
    )
    parquet.write_table(table, folder / "in.parquet", row_group_size=2)
    columns = ("--prompt-field", "question", "--id-field", "key")
    result = run(folder, "in.parquet", "in.jsonl", "-o", "out", *columns)
    assert result.returncode == 1  # in.jsonl has other columns
    assert b"running 10 requests" in result.stderr
    records = lines((folder / "out").read_bytes())
    assert [record.get("text") for record in records[:4]] == ["AB", "CD", "CD1", "EF"]
    assert [record["id"] for record in records[:4]] == [7, 8, 8, 9]
    assert records[3]["metadata"] == {"when": "2026-12-03"}
    assert records[4]["error"]["file"] == "in.jsonl"
    refused = run(folder, "in.parquet", "--format", "text")
    assert refused.returncode == 2
    assert b"in.parquet has columns, not lines of text" in refused.stderr


def test_a_parquet_file_that_is_none(folder):
    pytest.importorskip("pyarrow.parquet")
    (folder / "in.parquet").write_bytes(b"garbage")
    for quiet in ([], ["-q"]):
        result = run(folder, "in.parquet", "-o", "out", *quiet)
        assert result.returncode == 3
        assert b"reading in.parquet failed" in result.stderr
        assert b"Traceback" not in result.stderr


def test_columns_that_are_named_are_no_openai_line(folder):
    write(folder / "in.jsonl", [{"url": "u1", "body": "ab", "custom_id": "c", "title": "t"}])
    result = run(folder, "in.jsonl", "--prompt-field", "body", "--id-field", "url")
    (record,) = lines(result.stdout)
    assert (record["id"], record["text"]) == ("u1", "AB")
    assert record["metadata"] == {"custom_id": "c", "title": "t"}


def test_a_parquet_row_that_json_cannot_hold_fails_alone(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {
            "prompt": [b"ab", b"\xff\xfe", b"cd"],
            "took": pyarrow.array([1, 2, 3], pyarrow.duration("s")),
        }
    )
    parquet.write_table(table, folder / "in.parquet")
    result = run(folder, "in.parquet", "-o", "out", "--prompt-field", "prompt")
    assert result.returncode == 1, result.stderr
    first, second, third = lines((folder / "out").read_bytes())
    assert (first["text"], third["text"]) == ("AB", "CD")
    assert first["metadata"] == {"took": 1.0}
    assert second["error"]["line"] == 2
    assert "no place in JSON" in second["error"]["message"]
    assert "utf-8" in second["error"]["message"]


def test_a_damaged_parquet_file_is_named(folder):
    pytest.importorskip("pyarrow")
    (folder / "in.parquet").write_bytes(b"PAR1 no such thing")
    result = run(folder, "in.parquet", "-o", "out", "-q")
    assert result.returncode == 3
    assert b"error: reading in.parquet failed" in result.stderr
    assert b"Traceback" not in result.stderr


def test_a_missing_parquet_reader_is_named(folder):
    (folder / "in.parquet").write_bytes(b"")
    (folder / "pyarrow.py").write_text("raise ImportError\n")
    result = run(folder, "in.parquet", env={**os.environ, "PYTHONPATH": str(folder)})
    assert result.returncode == 2
    assert b"needs the package pyarrow (pip install 'ouro-batch[parquet]'" in result.stderr


def test_an_id_that_was_there_before(folder):
    write(
        folder / "in.jsonl", [*PROMPTS[:3], {"prompt": "ab"}, PROMPTS[1], {"id": 3, "prompt": "c"}]
    )
    write(folder / "more.jsonl", [{"id": "q0", "promt": 1}, {"id": "q2", "prompt": "x"}])
    result = run(folder, "in.jsonl", "more.jsonl", "-o", "out")
    assert result.returncode == 1
    records = lines((folder / "out").read_bytes())
    errors = {r["index"]: r["error"] for r in records if "error" in r}
    assert sorted(errors) == [4, 6, 7]
    assert errors[4]["type"] == errors[7]["type"] == "duplicate_id"
    assert errors[4]["message"].startswith("id 'q1' is the id of line 2 already (make ids unique")
    assert "is the id of line 3 of in.jsonl already" in errors[7]["message"]
    assert "unknown field 'promt'" in errors[6]["message"]
    kept = run(folder, "in.jsonl", "-o", "kept", "--on-duplicate", "keep")
    assert kept.returncode == 0
    assert [r["id"] for r in lines((folder / "kept").read_bytes())] == [
        "q0",
        "q1",
        "q2",
        3,
        "q1",
        3,
    ]


@pytest.mark.parametrize("name", ["in.gz", "in.zst"])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_compressed_file_is_named(folder, name, damage):
    compress = gzip.compress
    if name.endswith("zst"):
        compress = pytest.importorskip("zstandard").compress
    data = compress(os.urandom(200_000)) if damage == "cut" else b"plain text\n"
    (folder / name).write_bytes(data[:-5000] if damage == "cut" else data)
    result = run(folder, name, "-o", "out", "-q")
    assert result.returncode == 3
    assert f"error: reading {name} failed" in result.stderr.decode()
    assert b"Traceback" not in result.stderr


def test_a_missing_decompressor_is_named(folder):
    (folder / "in.zst").write_bytes(b"")
    (folder / "zstandard.py").write_text("raise ImportError\n")
    result = run(folder, "in.zst", env={**os.environ, "PYTHONPATH": str(folder)})
    assert result.returncode == 2
    assert b"needs the package zstandard (pip install 'ouro-batch[zstd]'" in result.stderr


@pytest.mark.parametrize(
    ("option", "stopped", "kept"),
    [
        (["--fail-fast"], b"a record failed, the last in line 2 of in.jsonl", 1),
        (["--max-errors", "2"], b"2 records failed, the last in line 4 of in.jsonl", 2),
        (["--max-errors", "3"], b"", 4),
    ],
)
def test_a_job_stops_at_as_many_errors_as_it_may_have(folder, option, stopped, kept):
    good = {"prompt": "abc"}
    write(folder / "in.jsonl", [good, {"promt": "x"}, good, {"prompt": "refuse me"}])
    result = run(folder, "in.jsonl", "-o", "out", *option)
    assert result.returncode == 1
    assert stopped in result.stderr
    if stopped:
        assert b"and with --retry-errors runs what failed again" in result.stderr
        assert names(folder) == ["in.jsonl", "out.part"]
        assert sum("error" in entry["record"] for entry in part_entries(folder)) == kept
    else:
        assert len(lines((folder / "out").read_bytes())) == kept


def test_text_and_other_columns(folder):
    (folder / "in.txt").write_bytes(b"\xef\xbb\xbfab\r\n\n  cd \nefg")
    assert run(folder, "in.txt", "-o", "out", "--format", "text").returncode == 0
    assert [r["text"] for r in lines((folder / "out").read_bytes())] == ["AB", "  CD ", "EFG"]
    write(folder / "in.jsonl", [{"q": "ab", "key": "k", "answer": 1}])
    result = run(folder, "in.jsonl", "--prompt-field", "q", "--id-field", "key")
    (record,) = lines(result.stdout)
    assert (record["id"], record["text"], record["metadata"]) == ("k", "AB", {"answer": 1})


def test_a_prompt_that_is_too_long_on_the_command_line(folder):
    write(folder / "in.jsonl", [{"prompt": "x " * 600 + "17 + 25 =", "max_tokens": 8}])
    command = [sys.executable, "-m", "ouro_batch", "run", "in.jsonl", "-q", "-m", str(TINY_OURO)]
    refused = subprocess.run(command, cwd=folder, capture_output=True)
    assert refused.returncode == 1
    assert lines(refused.stdout)[0]["error"]["type"] == "too_long"
    command += ["--on-too-long", "truncate-left"]
    (record,) = lines(subprocess.run(command, cwd=folder, capture_output=True).stdout)
    assert record["truncated_tokens"] > 0
    assert record["usage"]["prompt_tokens"] == 504  # of 512 positions
