"""The page at /: self-contained, it chats, and it shows both pools."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import CHROMIUM, Browser
from fake import make_service
from running import Running
from test_layers import ask

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time


def test_nothing_comes_from_elsewhere_and_it_can_be_switched_off() -> None:
    response = ask("GET", "/", make_service())
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:)([^\"'\s>)]+)", response.text) == []
    assert "//" not in re.sub(r"^\s*//.*$", "", response.text, flags=re.MULTILINE).replace("://", "")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert ask("GET", "/", make_service(dashboard=False)).status_code == 404
    assert ask("GET", "/", make_service(api_key="k")).status_code == 401


# A page of one element, and a server that keeps its metrics to itself.
STAND_INS = """
const element = {textContent: "", className: "", addEventListener() {}, firstElementChild: {setAttribute() {}}};
const found = {}, document = {getElementById: (id) => found[id] ||= {...element}, querySelector: () => element};
const answers = {health: [200, {status: "ok"}], metrics: [401, {error: {message: "the operator's key is needed"}}]};
const fetch = async (path) => {
  const [status, body] = answers[path] || [200, {data: [{id: "m"}]}];
  return {ok: status == 200, status, json: async () => body, text: async () => JSON.stringify(body)};
};
const shown = () => JSON.stringify([found["health"].textContent, found["queue-now"]?.textContent || ""]);
let polls = 0;
const setTimeout = (again) => ++polls < 3 ? again() : console.log(shown());
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node is installed")
def test_the_page_says_why_it_shows_no_pools() -> None:
    page = ask("GET", "/", make_service(admin_key="a")).text
    (script,) = re.findall(r"<script>(.*)</script>", page, re.DOTALL)
    program = STAND_INS + script.replace('"use strict";', "")
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == ["ok; the pools: the operator's key is needed", ""]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome)")
    browser = Browser(tmp_path)
    yield browser
    browser.close()


def open_page(browser: Browser, server: Running) -> None:
    browser.call("Page.navigate", url=server.url)
    browser.until("document.getElementById('health')?.textContent == 'ok'")


def test_in_a_browser_it_chats_and_shows_the_pools(browser: Browser, server: Running, http: httpx.Client) -> None:
    """SCREENSHOT=file keeps a picture."""
    open_page(browser, server)
    browser.run("document.getElementById('say').value = 'Write <b>a</b> class.'")
    browser.run("document.querySelector('form').requestSubmit()")
    browser.until("document.querySelector('.assistant')?.textContent.length > 5")
    browser.until("document.getElementById('go').textContent == 'Send'")
    assert browser.run("document.querySelector('.user').textContent") == "Write <b>a</b> class."
    assert browser.run("document.querySelectorAll('.error').length") == 0
    assert "tokens, the first after" in browser.run("document.getElementById('usage').textContent")
    for key in ("time-compute-0", "time-memory-0", "kv-memory-0", "kv-memory-1"):
        browser.until(f"document.getElementById('{key}') != null")
    browser.until("document.querySelector('#wait polyline').getAttribute('points').split(' ').length > 2")
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1500, "ignore_eos": True,
                                                      "stream": True}):  # fmt: skip
        browser.until("parseFloat(document.querySelector('#kv-memory-0 i').style.width) > 0")
        browser.until("document.getElementById('wait-now').textContent.endsWith('µs')")
        if place := os.environ.get("SCREENSHOT"):
            data = browser.call("Page.captureScreenshot", format="png")["data"]
            Path(place).write_bytes(base64.b64decode(data))
    assert browser.complaints == []


def test_in_a_browser_stop_ends_the_answer(browser: Browser, server: Running, http: httpx.Client) -> None:
    open_page(browser, server)
    browser.run("send('def f(x):'); 0")
    browser.until("document.querySelector('.assistant')?.textContent.length > 0")
    browser.run("running?.abort(); 0")
    browser.until("running == null")
    assert browser.run("document.querySelectorAll('.error').length") == 0
    browser.until("true")
