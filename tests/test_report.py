"""The timeline of a job and the report made of finished outputs."""

import gzip
import itertools
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from ouro_batch.jobs.errors import UsageError
from ouro_batch.jobs.job import Job
from ouro_batch.jobs.preview import INK, depth_colour
from ouro_batch.jobs.statistics import Timeline
from ouro_batch.report.answers import cut, find_prompts, find_tokenizer
from ouro_batch.report.build import build_report
from ouro_batch.report.page import page
from ouro_batch.report.palette import as_hex, night
from ouro_batch.report.source import Row
from ouro_batch.report.tally import DepthTable, Tally
from ouro_batch.report.terminal import _course
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
    job = Job(FakeLLM("fake"), [source], ListWriter())
    job.run()
    last = job.counts.timeline.to_list()[-1]
    assert (last["requests_done"], last["completion_tokens"], last["rows_in_use"]) == (9, 72, 0)


# Outputs to report on

HOSTILE = "\u202e\u2066\u200b\u200d\ufeff\u2028\x00\x1b\x7f\x85"
EVIL = "</script><script>evil=1</script><!-- <img src=x onerror=evil=1> &lt;b class='evil'>"


def make_output(path, answers=10, *, model=None, hostile=False, change=None, timeline=True):
    """Write an output and its statistics; every ``change``-th text is another one."""
    records, tokenizer = [], model and find_tokenizer(model, None, download=False)
    for index in range(answers):
        text = f"Answer {index} of them" + (" (changed)" if change and index % change == 0 else "")
        if hostile and index % 2:
            text = f"{EVIL} {HOSTILE} line\nline {index}" + "x" * 300
        ids = tokenizer.encode(text, False) if tokenizer else list(range(9))
        depths = [4, *(1 + (place + index) % 4 for place in range(len(ids) - 1))]
        records.append(
            {
                "id": f"{EVIL}{HOSTILE}" if hostile and index == 1 else f"id-{index}",
                "index": index,
                "text": text,
                "finish_reason": EVIL if hostile and index == 3 else "stop",
                "exit_depths": depths,
                "usage": {"prompt_tokens": 5 + index, "completion_tokens": len(depths)},
                "timing": {
                    "queue_s": 0.1,
                    "prefill_s": 0.2,
                    "decode_s": 0.01 * index,
                    "total_s": 0.3 + 0.01 * index,
                },
                "token_ids": ids,
            }
        )
    error = {"type": "too_long", "message": "too long", "line": answers + 1}
    if hostile:
        error.update(type=EVIL, message=EVIL + HOSTILE)
    records.append({"id": "bad", "index": answers, "error": error})
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    samples = [
        {
            "t_s": 0.5 * second,
            "requests_done": second,
            "prompt_tokens": 10 * second,
            "completion_tokens": 9 * second,
            "rows_in_use": 4,
            "waiting": 2,
            "kv_blocks_in_use": 9,
        }
        for second in range(1, answers + 1)
    ]
    statistics = {
        "model": {"name": model or (EVIL if hostile else "nowhere/at-all"), "revision": None},
        "device": "cpu",
        "loops": 4,
        "max_rows": 8,
        "seconds": {"run": 0.5 * answers},
        "options": {"inputs": [], "sampling": {"exit_threshold": 0.5}},
        "timeline": samples if timeline else [],
    }
    Path(f"{path}.stats.json").write_bytes(orjson.dumps(statistics))
    return str(path)


def numbers_of(*names, **options):
    return build_report(names, **options).to_json()


def run_report(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "ouro_batch", "report", *map(str, arguments)],
        capture_output=True,
        **options,
    )


# Numbers


def test_the_speed_of_a_resumed_job_is_that_of_its_last_run(tmp_path):
    out = make_output(tmp_path / "out")
    path = Path(f"{out}.stats.json")
    statistics = orjson.loads(path.read_bytes())
    statistics |= {"requests": {"resumed": 8}, "tokens_per_second": {"completion": 4.0}}
    path.write_bytes(orjson.dumps(statistics))
    numbers = numbers_of(out)["runs"][0]
    assert numbers["tokens_per_second"] == 4
    assert numbers["tokens"]["completion"] == 90
    assert any("made 3 of 11 records" in note for note in numbers["notes"])
    assert "made 3 of 11 records" in "".join(page(build_report([out])))
    assert b"made 3 of 11 records" in b" ".join(run_report(out, cwd=tmp_path).stdout.split())


def test_a_compressed_output_is_read(tmp_path):
    out = make_output(tmp_path / "out")
    plain = numbers_of(out)["runs"][0]
    Path(f"{out}.gz").write_bytes(gzip.compress(Path(out).read_bytes()))
    packed = numbers_of(f"{out}.gz")["runs"][0]
    assert packed.pop("output") != plain.pop("output")
    assert packed == plain


def test_records_done_are_those_of_the_last_sample(tmp_path):
    """Two samples may fall on one time."""
    out = make_output(tmp_path / "out")
    path = Path(f"{out}.stats.json")
    statistics = orjson.loads(path.read_bytes())
    last = statistics["timeline"][-1]
    statistics["timeline"].append({**last, "requests_done": 12_345})
    path.write_bytes(orjson.dumps(statistics))
    assert "<b>Records done</b><span>12,345</span>" in "".join(page(build_report([out])))


def test_the_second_token_is_called_token_2(tmp_path):
    """The first comes from prefill, and has no depth to show."""
    shown = run_report(make_output(tmp_path / "out"), text=True).stdout
    assert "token 2 " in shown
    assert "token 1 " not in shown


def test_a_record_that_is_there_twice_is_no_crash(tmp_path):
    out = Path(make_output(tmp_path / "out"))
    out.write_bytes(out.read_bytes() * 2)
    assert numbers_of(str(out), answers=50)["runs"][0]["requests"]["ok"] == 20


def test_records_of_a_part_that_count_no_more(tmp_path):
    part = tmp_path / "out.part"
    record = {"text": "ab", "exit_depths": [4, 1], "finish_reason": "stop"}
    entry = [
        {"index": index, "sample": 0, "hash": "0", "record": {"index": index, **record}}
        for index in (0, 1, 2)
    ]
    entries = [{"ouro_batch_part": 2, "settings": {}}, *entry]
    entries += [{"index": 1, "dropped": True}, entry[2], {"index": 0, "dropped": True}, entry[0]]
    part.write_bytes(b"".join(orjson.dumps(e) + b"\n" for e in entries))
    assert numbers_of(str(part))["runs"][0]["requests"]["ok"] == 2


@pytest.mark.parametrize("end", [n / 7 for n in range(1, 40)])
def test_the_course_of_any_length_is_shown(end):
    times = (0.0, end / 3, 2 * end / 3, end)
    samples = [{"t_s": t, "completion_tokens": t, "rows_in_use": 1} for t in times]
    for width in range(10, 61):
        _course({"timeline": samples, "max_rows": 4}, width)


def test_output_of_score_is_refused_by_name(tmp_path):
    score = {"id": 1, "index": 0, "logprob": -1.0, "greedy": True, "exit_depths": [4]}
    error = {"id": 0, "index": 1, "error": {"type": "no_answer", "message": "x", "line": 2}}
    (tmp_path / "scores").write_bytes(orjson.dumps(error) + b"\n" + orjson.dumps(score))
    result = run_report(tmp_path / "scores")
    assert result.returncode == 2
    assert b"is output of ouro-batch score" in result.stderr


def test_the_numbers_of_an_output(tmp_path):
    numbers = numbers_of(make_output(tmp_path / "out"))["runs"][0]
    depth = numbers["exit_depth"]
    assert numbers["requests"] == {
        "total": 11,
        "ok": 10,
        "failed": 1,
        "finish_reasons": {"stop": 10},
    }
    assert numbers["tokens"] == {"prompt": 95, "completion": 90, "decode": 80}
    assert numbers["tokens_per_second"] == 18
    assert depth["histogram"] == {"1": 20, "2": 20, "3": 20, "4": 20}
    assert (depth["mean"], depth["loops_saved"]) == (2.5, 0.375)
    by_position = depth["by_position"]["tokens_by_depth"]
    assert len(by_position) == 8
    assert by_position[0] == [3, 3, 2, 2]
    assert numbers["errors"] == [
        {
            "type": "too_long",
            "count": 1,
            "first": {"message": "too long", "line": 11, "file": None},
        }
    ]
    assert [slow["id"] for slow in numbers["slowest"][:2]] == ["id-9", "id-8"]
    assert numbers["latency_s"]["median"] == pytest.approx(0.34, rel=0.02)
    assert numbers["lengths"]["prompt"]["median"] == 9
    assert sum(numbers["lengths"]["prompt"]["bins"]["counts"]) == 10


def test_positions_share_bins_where_answers_are_long():
    table = DepthTable(bins=8)
    table.add([4, *[1] * 8])
    assert (table.width, table.by_position(2)) == (1, [[1, 0]] * 8)
    table.add([4, *[2] * 20])
    assert table.width == 4
    assert table.by_position(2) == [[4, 4], [4, 4], [0, 4], [0, 4], [0, 4]]
    assert table.depths == {1: 8, 2: 20}


def test_answers_without_tokens_or_decode_are_counted(tmp_path):
    out = tmp_path / "out"
    rows = ({"id": i, "index": i, "text": "", "exit_depths": [4][:i]} for i in range(2))
    jsonl(out, *rows)
    numbers = numbers_of(str(out), answers=5)["runs"][0]
    assert numbers["exit_depth"]["mean"] is None
    assert numbers["tokens"]["completion"] == 1
    assert run_report(out).returncode == 0


def test_runs_are_joined_by_id_or_by_index_where_ids_repeat(tmp_path):
    first = make_output(tmp_path / "a")
    second = make_output(tmp_path / "b", change=3)
    (compared,) = numbers_of(first, second)["comparisons"]
    assert compared["runs"] == ["A", "B"]
    assert (compared["joined"], compared["joined_by"], compared["same_text"]) == (10, "id", 6)
    assert compared["mean_depth"] == (2.5, 2.5)
    same = [{"id": "same", "index": i, "text": str(i), "exit_depths": [4, 1]} for i in range(3)]
    jsonl(tmp_path / "c", *same)
    (compared,) = numbers_of(str(tmp_path / "c"), str(tmp_path / "c"))["comparisons"]
    assert (compared["joined"], compared["joined_by"], compared["same_text"]) == (3, "index", 3)


def test_the_sample_is_the_same_in_every_run(tmp_path):
    names = [make_output(tmp_path / name, answers=50) for name in "ab"]
    report = build_report(names, answers=7)
    first, second = ([a.row.index for a in run.answers] for run in report.runs)
    assert first == second == sorted(first)
    assert len(first) == 7


def test_memory_stays_flat(tmp_path):
    rows = (
        Row(i, i, text="x" * 100, depths=[4, 1 + i % 4], seconds=(0, 0, 0, float(i % 97)))
        for i in range(20_000)
    )
    tally = Tally(sample_size=20)
    tracemalloc.start()
    for row in rows:
        tally.add(row)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20
    assert len(tally.sample) == 20
    assert [row.seconds[3] for row in tally.slowest] == [96.0] * 10


# Outputs as they are found


def test_a_job_that_was_cut_off(tmp_path):
    out = Path(make_output(tmp_path / "out"))
    whole = out.read_bytes().splitlines()
    part = tmp_path / "cut.part"
    header = b'{"ouro_batch_part":1,"settings":{"model":"nowhere/at-all","loops":4}}\n'
    entries = [b'{"index":%d,"hash":"0","record":%s}\n' % (n, r) for n, r in enumerate(whole)]
    part.write_bytes(header + b"".join(entries)[:-20])
    numbers = numbers_of(str(tmp_path / "cut"))["runs"][0]
    assert numbers["requests"]["ok"] == 10
    assert numbers["model"] == "nowhere/at-all"
    assert [note.split(":")[0] for note in numbers["notes"]] == [
        f"{tmp_path / 'cut'} is not there yet",
        "the job has not finished",
        "the last line is torn, as a job that was cut off leaves it",
    ]


def test_lines_that_are_no_records_are_left_out(tmp_path):
    out = tmp_path / "out"
    good = {"id": 1, "index": 0, "text": "a", "exit_depths": [2]}
    odd = [{"index": 1, "text": "a", "exit_depths": [10**30]}, [1], {"index": -1}, None, "x"]
    out.write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in (good, *odd[1:])) + b"\n{broken\n")
    numbers = numbers_of(str(out))["runs"][0]
    assert numbers["requests"]["total"] == 1
    assert numbers["notes"][-1] == "5 lines are no output record, left out (first: line 2)"
    out.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(UsageError, match="holds no output records"):
        build_report([str(out)])


@pytest.mark.parametrize(
    "statistics",
    [b"[]", b"{", b"null", b'{"model": 3, "loops": "x", "timeline": [{"t_s": {}}, 4]}'],
)
def test_any_statistics_file_will_do(tmp_path, statistics):
    out = make_output(tmp_path / "out")
    Path(f"{out}.stats.json").write_bytes(statistics)
    report = build_report([out], answers=3)
    assert report.runs[0].numbers["requests"]["ok"] == 10
    assert "".join(page(report))


# Tokens and prompts


def test_token_ids_give_pieces_of_the_text(tmp_path):
    out = make_output(tmp_path / "out", answers=2, model="samples/tiny-ouro")
    answer = build_report([out], answers=2).runs[0].answers[0]
    assert "".join(piece for piece, _ in answer.pieces) == answer.row.text
    assert [depth for _, depth in answer.pieces] == answer.row.depths


def test_text_is_tokenized_again_where_there_are_no_ids():
    tokenizer = find_tokenizer("samples/tiny-ouro", None, download=False)
    ids = tokenizer.encode("twelve and 34", False)
    depths = [4, *[1] * len(ids)]
    row = Row(0, 0, text="twelve and 34", depths=depths)
    pieces = cut(row, tokenizer)
    assert "".join(piece for piece, _ in pieces) == "twelve and 34"
    assert pieces[-1] == ("", 1), "the end token has no text"
    assert cut(replace(row, depths=depths[:-2]), tokenizer) is None
    assert cut(row, None) is None
    other = replace(row, text="something else", token_ids=[*ids, 0])
    assert cut(other, tokenizer) is None, "the tokens of another model"
    stopped = replace(row, text="twelve", token_ids=[*ids, 0])
    assert "".join(piece for piece, _ in cut(stopped, tokenizer)) == "twelve"


def test_prompts_come_from_the_inputs_where_their_ids_fit(tmp_path):
    source = jsonl(
        tmp_path / "in",
        {"id": "a", "prompt": "why?"},
        {"messages": [{"role": "user", "content": "how?"}]},
        {"id": "c", "prompt": "changed"},
        {"prompt": [1, 2, 3]},
    )
    ids = {0: "a", 1: 1, 2: "other", 3: 3}
    assert find_prompts([source], ids.keys(), ids) == {0: "why?", 1: "how?", 3: "3 token ids"}
    assert find_prompts([str(tmp_path / "gone")], ids.keys(), ids) == {}


# The page


def test_the_page_holds_no_text_that_is_not_escaped(tmp_path):
    out = make_output(tmp_path / "out", hostile=True)
    html = "".join(page(build_report([out], answers=9)))
    assert html.count("<script>") == html.count("</script>") == 1
    assert "<img" not in html
    assert not [character for character in HOSTILE if character in html]
    assert "‹U+202E›" in html
    assert "&lt;/script&gt;" in html


def test_the_page_asks_for_nothing(tmp_path):
    html = "".join(page(build_report([make_output(tmp_path / "out")], answers=9)))
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', html) == ["data:,"]


def contrast(one, other):
    def light(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("loops", [1, 2, 3, 4, 8])
def test_ink_is_readable_on_every_depth(loops):
    for depth in range(1, loops + 1):
        colour = depth_colour(depth, loops)
        assert contrast(INK, colour) >= 4.5
        assert contrast(INK, as_hex(night(colour))) >= 4.5


# The command


def test_the_command_prints_and_writes(tmp_path):
    outs = [make_output(tmp_path / name, hostile=name == "b") for name in "ab"]
    html = tmp_path / "page.html"
    done = run_report(*outs, "--html", html)
    assert (done.returncode, done.stderr) == (0, f"page: {html}\n".encode())
    shown = done.stdout.decode()
    assert "10 answered, 1 failed" in shown
    assert "Side by side" in shown
    assert not [character for character in HOSTILE if character in shown]
    assert max(map(len, shown.splitlines())) <= 80
    assert html.read_text("utf-8").startswith("<!doctype html>")
    again = run_report(outs[0], "--html", html, "--json")
    assert orjson.loads(again.stdout)["runs"][0]["requests"]["ok"] == 10


def test_standard_input_is_an_output_too(tmp_path):
    data = Path(make_output(tmp_path / "out")).read_bytes()
    done = run_report("-", "--json", input=data)
    assert orjson.loads(done.stdout)["runs"][0]["output"] == "standard input"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "cannot read missing: No such file or directory"),
        (["."], "cannot read .: it is a folder"),
        (["out", "--html", "out"], "out exists and is no page of this command"),
        (["out", "--html", "no/page.html"], "there is no folder"),
        (["-", "-"], "standard input (-) can be read only once"),
    ],
)
def test_wrong_use_has_status_2(tmp_path, arguments, message):
    make_output(tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    done = run_report(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert (tmp_path / "out").read_bytes() == before


def test_a_model_that_cannot_be_had_has_status_3(tmp_path):
    done = run_report(make_output(tmp_path / "out"), "--html", tmp_path / "p", "--model", "./gone")
    assert done.returncode == 3
    assert "there is no model folder" in done.stderr.decode()
