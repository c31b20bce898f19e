"""The report's page in a real browser, driven over Chromium's debugging pipe."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import orjson
import pytest

from ouro_batch.report.build import build_report
from ouro_batch.report.page import page
from tests.test_report import HOSTILE, make_output

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --remote-debugging-pipe"
)
PHONE, DESKTOP = (390, 844), (1280, 900)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)"),
]


class Browser:
    """One page in Chromium: commands go out on file 3, answers and events come in on file 4."""

    def __init__(self):
        self.events = []
        self._ids = itertools.count(1)
        self._buffer = b""
        self._folder = tempfile.mkdtemp()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        keep_in, keep_out = os.dup(theirs_in), os.dup(theirs_out)

        def arrange():
            high_in, high_out = os.dup2(keep_in, 103), os.dup2(keep_out, 104)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS.split(), f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=arrange,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for file in (theirs_in, theirs_out, keep_in, keep_out):
            os.close(file)
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path, size, *, dark=False):
        self.events.clear()
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        for _ in range(100):
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.05)
        raise AssertionError("the page did not load")

    def run(self, script):
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path, *, whole=False):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], 30)
            assert ready, "Chromium does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    first = make_output(folder / "first.jsonl", answers=30, hostile=True)
    second = make_output(folder / "second.jsonl", answers=30, change=3)
    made = {}
    for name, outputs in (("single", [first]), ("several", [first, second])):
        made[name] = folder / f"{name}.html"
        made[name].write_text("".join(page(build_report(outputs, answers=200))), "utf-8")
    return made


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["single", "several"])
def test_the_page_works_alone_and_fits(browser, pages, name, size, dark):
    browser.open(pages[name], size, dark=dark)
    assert browser.run("document.getElementById('script-error').hidden")
    assert browser.run("document.documentElement.scrollWidth") == size[0]
    bad = [
        e
        for e in browser.events
        if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert bad == []
    asked = {
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith("data:")} == {pages[name].as_uri()}
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 384
    assert light != dark


def test_hostile_text_is_text(browser, pages):
    browser.open(pages["single"], DESKTOP)
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.querySelectorAll('img, iframe, b.evil').length") == 0
    assert browser.run("window.evil === undefined")
    assert browser.run("document.body.textContent.includes('</script><script>evil=1')")
    assert browser.run("document.body.textContent.includes('‹U+202E›')")
    assert not any(
        browser.run(f"document.body.textContent.includes({json.dumps(c)})") for c in HOSTILE
    )


def visible(browser):
    return browser.run("[...document.querySelectorAll('.answer')].filter(a => !a.hidden).length")


def test_the_viewer_searches_sorts_and_shows_more(browser, pages):
    browser.open(pages["several"], DESKTOP)
    assert visible(browser) == 10
    browser.run("document.getElementById('more').click()")
    assert visible(browser) == 30
    assert browser.run("document.getElementById('more').hidden")
    browser.run(
        "s = document.getElementById('search'); s.value = 'ANSWER 17';"
        " s.dispatchEvent(new Event('input'))"
    )
    assert visible(browser) == 1
    browser.run("s.value = ''; s.dispatchEvent(new Event('input'))")
    browser.run("document.getElementById('differ').click()")
    assert browser.run("document.getElementById('found').textContent") == "10 of 20 answers"
    browser.run(
        "o = document.getElementById('order'); o.value = 'deep';"
        " o.dispatchEvent(new Event('change'))"
    )
    depths = browser.run(
        "[...document.querySelectorAll('.answer')].filter(a => !a.hidden)"
        ".map(a => +a.dataset.depth)"
    )
    assert depths == sorted(depths, reverse=True)


def test_a_tapped_token_tells_its_depth(browser, pages):
    browser.open(pages["single"], PHONE)
    browser.run("document.querySelectorAll('.strip')[1].children[2].click()")
    assert not browser.run("document.getElementById('inspect').hidden")
    assert "left after loop" in browser.run("document.getElementById('inspect').textContent")
    browser.run("document.querySelector('h1').click()")
    assert browser.run("document.getElementById('inspect').hidden")


def test_a_page_of_the_sample_model_colours_its_tokens(browser, tmp_path):
    output = make_output(tmp_path / "tiny.jsonl", answers=3, model="samples/tiny-ouro")
    report = build_report([output], answers=5)
    path = tmp_path / "tiny.html"
    path.write_text("".join(page(report)), "utf-8")
    browser.open(path, DESKTOP)
    record = orjson.loads(Path(output).read_bytes().splitlines()[0])
    tokens = browser.run("document.querySelector('.tokens').children.length")
    assert tokens == len(record["exit_depths"])
    shown = browser.run("[...document.querySelectorAll('.tokens')][0].textContent")
    assert shown == record["text"]
