"""What a job shows while it runs and when it has ended, on terminals and without one."""

import io

import pytest
from rich.console import Console

from ouro_batch.jobs.preview import (
    Answer,
    depth_bar,
    depth_colour,
    duration,
    print_answers,
    token_pieces,
)
from ouro_batch.jobs.progress import (
    JobTitle,
    LiveProgress,
    LogProgress,
    QuietProgress,
    open_progress,
    print_summary,
)
from ouro_batch.jobs.records import Record
from ouro_batch.jobs.statistics import JobCounts
from ouro_batch.params import RequestOutput, SamplingParams, Timing, Usage
from tests.fakes import LOOPS, FakeLLM, FakeSnapshot

TITLE = JobTitle(model="tiny", device="cpu (fake)", schedule="refill", loops=LOOPS, total=10)
ENGINE = FakeSnapshot(
    rows_in_use=3,
    max_rows=4,
    waiting=5,
    kv_blocks_in_use=1200,
    kv_blocks=4096,
    prompt_tokens=70,
    completion_tokens=50,
    decode_tokens=40,
    decode_loops=100,
)


def console(*, terminal, width=110):
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        color_system="truecolor" if terminal else None,
        no_color=not terminal,
        width=width,
        highlight=False,
        legacy_windows=False,
    )


def shown(console):
    return console.file.getvalue()


def answer(text, depths, pieces=None, prompt="a question", messages=None):
    tokens = [ord(letter) for letter in pieces or text]
    output = RequestOutput(
        request_id=0,
        text=text,
        token_ids=tokens,
        exit_depths=depths,
        finish_reason="stop",
        usage=Usage(3, len(tokens), sum(depths[1:])),
        timing=Timing(0, 0, 0, 0),
        seed=0,
    )
    prompt = None if messages else prompt
    record = Record(2, 1, "in", 2, SamplingParams(), prompt=prompt, messages=messages)
    return Answer(record, output)


def show(screen, answer, llm):
    print_answers(screen, [answer], [token_pieces(llm, answer.output)], LOOPS)


def counts():
    result = JobCounts()
    for depths in ([4, 1, 1, 2], [4, 4]):
        result.add_output(answer("a" * len(depths), depths).output)
    result.add_error("invalid_json")
    return result


def test_log_lines_without_a_terminal():
    screen = console(terminal=False, width=40)
    progress = LogProgress(screen, TITLE, every_s=0.0)
    progress.update(counts(), ENGINE)
    first, second = shown(screen).splitlines()
    assert first == "running 10 requests: tiny on cpu (fake), refill, 4 loops"
    for part in (
        "3 of 10 requests",
        "1 failed",
        " left",
        "tokens/s",
        "mean exit depth 2.50",
        "rows 3 of 4",
        "cache 1,200 of 4,096 blocks",
    ):
        assert part in second


def test_log_lines_keep_their_distance():
    screen = console(terminal=False)
    progress = LogProgress(screen, TITLE, every_s=60.0)
    for _ in range(100):
        progress.update(counts(), ENGINE)
    assert len(shown(screen).splitlines()) == 1


@pytest.mark.parametrize("width", [80, 110])
def test_live_display_shows_the_job(width):
    screen = console(terminal=True, width=width)
    progress = LiveProgress(screen, TITLE)
    progress.update(counts(), ENGINE)
    drawn = console(terminal=False, width=width)
    progress._console = drawn
    drawn.print(progress)
    progress.close()
    text = shown(drawn)
    for part in (
        "3 of 10",
        "1 failed",
        " left",
        "3 of 4",
        "5 waiting",
        "1,200 of 4,096 blocks",
        "mean 2.50",
        "tokens/s",
    ):
        assert part in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_live_display_before_the_first_step():
    screen = console(terminal=True)
    progress = LiveProgress(screen, TITLE)
    progress.close()
    assert "tiny" in shown(screen)


def test_unknown_total_has_no_time_left():
    screen = console(terminal=False)
    title = JobTitle("tiny", "cpu", "refill", LOOPS, None)
    LogProgress(screen, title, every_s=0.0).update(counts(), ENGINE)
    assert "3 requests, 1 failed" in shown(screen)
    assert "left" not in shown(screen)


def test_the_display_that_suits():
    terminal, plain = console(terminal=True), console(terminal=False)
    live = open_progress(terminal, TITLE, quiet=False, records_shown=False)
    live.close()
    assert isinstance(live, LiveProgress)
    for screen, scroll in ((terminal, True), (plain, False)):
        progress = open_progress(screen, TITLE, quiet=False, records_shown=scroll)
        assert isinstance(progress, LogProgress)
    assert isinstance(
        open_progress(terminal, TITLE, quiet=True, records_shown=False), QuietProgress
    )


def test_summary():
    screen = console(terminal=False)
    print_summary(screen, counts(), LOOPS, [("records", "/a/" + "long/" * 40 + "out.jsonl")])
    text = shown(screen)
    assert "2 done, 1 failed (1 invalid_json)" in text
    assert "mean 2.00 of 4" in text
    assert "1: 50%, 2: 25%, 3: 0%, 4: 25%" in text
    assert "long/out.jsonl\n" in text


def test_summary_of_a_resumed_job_says_whose_speed_it_is():
    screen, resumed = console(terminal=False), counts()
    resumed.resumed = JobCounts(ok=2)
    print_summary(screen, resumed, LOOPS, [])
    assert "in prompts; the speed is that of 1 record of this run" in shown(screen)


def test_summary_of_nothing():
    screen = console(terminal=False)
    print_summary(screen, JobCounts(), LOOPS, [])
    assert "0 done" in shown(screen)


def test_depth_bar_fills_its_width():
    for histogram in ({1: 1}, {1: 1, 2: 1, 3: 1}, {2: 999, 4: 1}, {1: 5, 2: 6, 3: 7, 4: 8}):
        assert depth_bar(histogram, 4, 32).plain == "█" * 32


def test_colours_differ_by_depth():
    for loops in (1, 2, 4, 8):
        assert len({depth_colour(depth, loops) for depth in range(1, loops + 1)}) == loops


def test_digits_stand_under_their_tokens_without_colour():
    screen = console(terminal=False)
    show(screen, answer("abc", [4, 1, 2]), FakeLLM("x"))
    lines = [line.rstrip() for line in shown(screen).splitlines()]
    assert lines[2:] == [
        "  2 a question",
        "    abc",
        "    412",
        "    mean exit depth 1.50, 3 tokens, stop",
    ]


class WordLLM(FakeLLM):
    def token_texts(self, token_ids):
        return ["One", " token", "", " 漢字", "\n", "two\nlines"][: len(token_ids)]


def test_digits_with_words_wide_letters_and_line_breaks():
    text = "One token 漢字\ntwo\nlines"
    screen = console(terminal=False)
    show(screen, answer(text, [4, 1, 3, 2, 1, 3], pieces="x" * 6), WordLLM("x"))
    lines = [line.rstrip() for line in shown(screen).splitlines()]
    assert lines[3:-1] == [
        "    One token 漢字⏎",
        "    4  1     2    1",
        "    two",
        "    3",
        "    lines",
        "    3",
    ]


def test_long_answers_wrap_with_their_digits():
    screen = console(terminal=False, width=60)
    show(screen, answer("x" * 120, [1] * 120), FakeLLM("x"))
    lines = [line.strip() for line in shown(screen).splitlines()]
    assert lines[-7:-1] == ["x" * 56, "1" * 56, "x" * 56, "1" * 56, "x" * 8, "1" * 8]


def test_coloured_tokens():
    screen = console(terminal=True)
    show(screen, answer("ab", [4, 1]), FakeLLM("x"))
    red, green = (
        "48;2;" + ";".join(str(int(depth_colour(depth, LOOPS)[i : i + 2], 16)) for i in (1, 3, 5))
        for depth in (4, 1)
    )
    text = shown(screen)
    assert f"{red}ma" in text
    assert f"{green}mb" in text


def test_text_cut_by_a_stop_string_and_control_characters():
    screen = console(terminal=False)
    cut = answer("a\x1bb", [4, 1, 2, 3, 3], pieces="a\x1bbXX", prompt="q\x1b[2J\nr")
    show(screen, cut, FakeLLM("x"))
    text = shown(screen)
    assert "\x1b" not in text
    assert "    a�b\n    412\n" in text


def test_question_of_chat_and_token_prompts():
    for asked, expected in (
        ({"messages": [{"role": "user", "content": "hi there"}]}, "hi there"),
        ({"prompt": [1, 2, 3]}, "3 token ids"),
        ({"prompt": "long " * 100}, "…"),
    ):
        screen = console(terminal=False, width=60)
        show(screen, answer("a", [4], **asked), FakeLLM("x"))
        assert expected in shown(screen)
        assert "1 tokens, stop" in shown(screen)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (59.2, "59 s"), (65, "1:05"), (7384, "2:03:04")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_question_in_parts_is_shown_joined():
    content = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    screen = console(terminal=False, width=80)
    messages = [{"role": "user", "content": content}]
    show(screen, answer("ab", [4, 1], messages=messages), FakeLLM("x"))
    assert "one two" in shown(screen)
