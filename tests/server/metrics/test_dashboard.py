"""The page at /: self-contained, it chats, and it shows both pools."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from browser import CHROMIUM, Browser
from fake import FakeClient, make_service
from msgspec import structs
from running import ROOT, Running
from shipped import MODEL
from test_layers import ask

from lamina.models.tokenizer import load_tokenizer
from lamina.server.app import make_app, with_middleware
from lamina.server.call import Service

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time
KEY = "secret-of-the-page"
# What a hostile model may say: as markup, in links, in every place of Markdown.
ATTACKS = """<img src=x onerror="stolen=1"> <script>stolen=1</script> <svg onload="stolen=1"></svg>

# <img src=x onerror="stolen=1">

- <b onmouseover="stolen=1">item</b>

| <script>stolen=1</script> | b |
|---|---|
| <img src=x onerror="stolen=1"> | `<script>stolen=1</script>` |

> <iframe src="javascript:stolen=1"></iframe>

[click](javascript:stolen=1) [data](data:text/html,<script>stolen=1</script>) **<img src=x onerror="stolen=1">**
[quoted](https://example.org/"onmouseover="stolen=1) ![picture](https://example.org/steal.png)

```html
<script>stolen=1</script></code></pre><img src=x onerror="stolen=1">
```
"""
MARKDOWN = """## A stack

It keeps **what comes *last*** on top: `push` and `pop`, see https://example.org/stack.
Names like __init__ and snake_case_name stay, and 2 * 3 * 4 too.

1. first
   - inner
   - other
2. second

```python
class Stack:
    items: list = []   # <b>
```

> quoted

| name | does |
|:--|--:|
| push | adds |

---
"""


class Saying(FakeClient):
    """A client whose model says ``text`` in pieces of 16 characters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def deltas_of(self, key: int, index: int, params: Any, *, last: bool) -> Any:
        first, end = super().deltas_of(key, index, params, last=last)
        pieces = [self.text[i : i + 16] for i in range(0, len(self.text), 16)]
        said = [structs.replace(first, text=piece, token_ids=list(first.token_ids)) for piece in pieces]
        return [*said, structs.replace(end, text="")]


@contextmanager
def served(service: Service) -> Iterator[str]:
    """Serve the real application over HTTP. Yields its URL."""
    app = with_middleware(make_app(service), service)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def test_nothing_comes_from_elsewhere_and_it_can_be_switched_off() -> None:
    response = ask("GET", "/", make_service())
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:)([^\"'\s>)]+)", response.text) == []
    assert "//" not in re.sub(r"^\s*//.*$", "", response.text, flags=re.MULTILINE).replace("://", "")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert ask("GET", "/", make_service(dashboard=False)).status_code == 404
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", response.text)


def test_a_browser_without_the_key_gets_the_page_and_nothing_else() -> None:
    service = make_service(api_key=KEY)
    assert ask("GET", "/", service).text == ask("GET", "/", make_service()).text
    assert [ask("GET", path, service).status_code for path in ("/x", "/v1/models", "/metrics", "/docs")] == [401] * 4
    assert ask("POST", "/", service).status_code == 405
    assert ask("GET", "/", make_service(api_key=KEY, dashboard=False)).status_code == 404


# A page of few elements, and a server that keeps its metrics to itself.
STAND_INS = """
const stub = {textContent: "", className: "", value: "", addEventListener() {}, firstElementChild: {setAttribute() {}}};
const found = {}, asked = [], sessionStorage = {getItem: () => null};
const getElementById = (id) => found[id] ||= {...stub};
const document = {getElementById, querySelector: () => stub, querySelectorAll: () => []};
const answers = {health: [200, {status: "ok"}], metrics: [401, {error: {message: "the operator's key is needed"}}]};
const fetch = async (path) => {
  asked.push(path);
  const [status, body] = answers[path] || [200, {data: [{id: "m", max_model_len: 9}]}];
  return {ok: status == 200, status, json: async () => body, text: async () => JSON.stringify(body)};
};
const shown = () => JSON.stringify([found["health"].textContent, found["closed"].textContent, asked]);
let polls = 0;
const setTimeout = (again) => ++polls < 3 ? again() : console.log(shown());
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node is installed")
def test_the_page_says_why_it_shows_no_pools_and_asks_once() -> None:
    page = ask("GET", "/", make_service(admin_key="a")).text
    (script,) = re.findall(r"<script>(.*)</script>", page, re.DOTALL)
    program = STAND_INS + script.replace('"use strict";', "")
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=True)
    health, why, asked = json.loads(done.stdout)
    assert (health, why) == ("ok", "The pools are not shown: the operator's key is needed")
    assert (asked.count("health"), asked.count("metrics")) == (3, 1)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome)")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.call("Page.navigate", url="about:blank")  # the last page asks its server no longer
    chromium.until("location.href == 'about:blank'")
    chromium.complaints.clear()
    chromium.show(width=1280)
    return chromium


def open_page(browser: Browser, url: str) -> None:
    browser.call("Page.navigate", url=url)
    browser.until("document.getElementById('health')?.textContent == 'ok'")


def say(browser: Browser, text: str) -> None:
    """Send a message as a user does, and wait for the whole answer."""
    browser.run(f"document.getElementById('say').value = {json.dumps(text)}; form.requestSubmit()")
    browser.until("!running && document.querySelector('.assistant:last-child .copy, .error')")


def test_in_a_browser_it_chats_and_shows_the_pools(browser: Browser, server: Running, http: httpx.Client) -> None:
    """SCREENSHOT=file keeps a picture."""
    open_page(browser, server.url)
    browser.until("document.getElementById('model').textContent.startsWith('tiny, ')")
    say(browser, "Write <b>a</b> class.")
    assert browser.run("document.querySelector('.user').textContent") == "Write <b>a</b> class."
    assert browser.run("document.querySelectorAll('.error').length") == 0
    assert "tokens, the first after" in browser.run("document.getElementById('usage').textContent")
    for key in ("time-compute-0", "time-memory-0", "kv-memory-0", "kv-memory-1"):
        browser.until(f"document.getElementById('{key}') != null")
    browser.until("document.querySelector('#wait polyline').getAttribute('points').split(' ').length > 2")
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1500, "ignore_eos": True,
                                                      "stream": True}):  # fmt: skip
        browser.until("parseFloat(document.querySelector('#kv-memory-0 i').style.width) > 0")
        browser.until("/[µm]s$/.test(document.getElementById('wait-now').textContent)")
        if place := os.environ.get("SCREENSHOT"):
            browser.picture(Path(place))
    assert browser.complaints == []


def test_in_a_browser_stop_ends_the_answer_and_a_new_chat_forgets(browser: Browser, server: Running) -> None:
    open_page(browser, server.url)
    browser.run("send('def f(x):'); 0")
    browser.until("document.querySelector('.assistant .text')?.textContent.length > 0")
    browser.run("form.requestSubmit()")
    browser.until("running == null")
    assert browser.run("document.querySelectorAll('.error').length") == 0
    assert browser.run("talk.map((turn) => turn.role)") == ["user", "assistant"]
    browser.run("document.getElementById('new').click()")
    assert browser.run("[talk.length, document.getElementById('log').children.length]") == [0, 0]


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(browser: Browser) -> None:
    with served(make_service(Saying("yes"), api_key=KEY)) as url:
        open_page(browser, url)
        browser.until("document.getElementById('settings').open")
        assert "API key" in browser.run("document.getElementById('model').textContent")
        say(browser, "Anybody there?")
        assert "API key" in browser.run("document.querySelector('.error').textContent")
        assert browser.run("[talk.length, document.getElementById('say').value]") == [0, "Anybody there?"]
        browser.run(f"$('key').value = ' {KEY} '; $('key').dispatchEvent(new Event('change'))")
        browser.until("document.getElementById('model').textContent.startsWith('tiny, 256 tokens')")
        browser.until("document.getElementById('time-compute-0') && document.getElementById('closed').hidden")
        say(browser, "And now?")
        assert browser.run("document.querySelector('.assistant .text').textContent") == "yes"
        browser.call("Page.reload")
        browser.until("document.getElementById('model')?.textContent.startsWith('tiny')")
        facts = "[location.href, document.cookie, localStorage.length, sessionStorage.getItem('key')]"
        assert browser.run(facts) == [f"{url}/", "", 0, KEY]


def test_a_conversation_is_sent_whole_with_its_settings(browser: Browser) -> None:
    client = Saying("an answer")
    with served(make_service(client)) as url:
        open_page(browser, url)
        say(browser, "One?")
        browser.run("$('system').value = 'Be brief.'; $('temperature').value = '0.25'; $('top_p').value = '0.5'")
        say(browser, "Two?")
        tokenizer = load_tokenizer(str(ROOT / MODEL))
        first, second = (tokenizer.decode(prompt) for prompt, _ in client.added)
        assert [text in first for text in ("One?", "Be brief.")] == [True, False]
        parts = ("Be brief.", "One?", "an answer", "Two?")
        assert sorted(parts, key=second.index) == list(parts)
        _, params = client.added[1]
        assert (params.temperature, params.top_p) == (0.25, 0.5)
        assert params.max_tokens is None, "as far as the context goes"
        browser.run("$('top_p').value = '7'")
        say(browser, "Three?")
        assert "top_p" in browser.run("document.querySelector('.error').textContent")
        assert browser.run("talk.length") == 4


def test_what_a_model_says_is_text_whatever_it_says(browser: Browser) -> None:
    """The control: the same text as markup does run without the page's policy, in a page of its own."""
    with served(make_service(Saying(ATTACKS))) as url:
        open_page(browser, url)
        browser.run("window.stolen = 0")
        say(browser, "<img src=x onerror='stolen=1'>")
        browser.run("document.querySelectorAll('.assistant *').forEach((e) => e.dispatchEvent(new Event('mouseover')))")
        kinds = browser.run("[...new Set([...document.querySelectorAll('#log *')].map((e) => e.localName))].sort()")
        made = "a blockquote button code div h3 li p pre span strong table td th tr ul"
        assert set(kinds) <= set(made.split())
        links = browser.run("[...document.querySelectorAll('#log a')].map((a) => a.protocol + a.rel)")
        assert links
        assert set(links) == {"https:noopener noreferrer"}
        named = browser.run("[...document.querySelectorAll('#log *')].flatMap((e) => e.getAttributeNames())")
        assert set(named) <= {"class", "href", "rel", "tabindex", "target", "title", "type"}
        shown = browser.run("document.querySelector('.assistant .text').textContent")
        assert shown.count("stolen=1") == ATTACKS.count("stolen=1") - 1, "all but the address of a link"
        assert browser.run("window.stolen") == 0
        assert browser.complaints == []
    browser.call("Page.navigate", url="about:blank")
    browser.run(f"document.body.innerHTML = {json.dumps(ATTACKS)}")
    browser.until("window.stolen == 1")


def test_markdown_is_drawn_and_copied(browser: Browser) -> None:
    with served(make_service(Saying(MARKDOWN))) as url:
        open_page(browser, url)
        browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        say(browser, "Explain a stack.")
        outline = browser.run("""(function text(e) {
            return [...e.childNodes].filter((n) => n.localName !== "button").map((n) =>
              n.nodeType === 3 ? n.data : `<${n.localName}>${text(n)}</>`).join("");
        })(document.querySelector(".assistant .text"))""")
        assert (
            outline
            == """\
<h4>A stack</><p>It keeps <strong>what comes <em>last</></> on top: <code>push</> and <code>pop</>, \
see <a>https://example.org/stack</>.
Names like __init__ and snake_case_name stay, and 2 * 3 * 4 too.</>\
<ol><li><p>first</><ul><li><p>inner</></><li><p>other</></></></><li><p>second</></></>\
<div><span>python</><pre><code>class Stack:
    items: list = []   # <b></></></><blockquote><p>quoted</></>\
<div><table><tr><th>name</><th>does</></><tr><td>push</><td>adds</></></></><hr></>"""
        )
        code = "class Stack:\n    items: list = []   # <b>"
        for place, text in ((".assistant > .copy", MARKDOWN), (".code .copy", code)):
            browser.run("navigator.clipboard.writeText('before')")
            browser.run(f"document.querySelector('{place}').click()")
            browser.until(f"document.querySelector('{place}').textContent == 'Copied'")
            assert browser.run("navigator.clipboard.readText()") == text


@pytest.mark.parametrize("text", ["> " * 5000, "- " * 5000, "*" * 20_000, "`" * 20_001 + " `", "[" * 20_000,
                                  "|" * 20_000, "**a " * 5000, "- a\n" * 3000, "```" * 5000, "\n" * 5000,
                                  "    " * 5000 + "- a"])  # fmt: skip
def test_markdown_of_any_shape_is_drawn_soon(browser: Browser, text: str) -> None:
    with served(make_service()) as url:
        open_page(browser, url)
        took = browser.run(f"""(() => {{ const e = document.createElement("div"), start = performance.now();
            render(e, {json.dumps(text)}); return performance.now() - start; }})()""")
        assert took < 3000


def test_a_broken_answer_is_no_whole_one(browser: Browser) -> None:
    with served(make_service()) as url:
        open_page(browser, url)
        body = 'data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n'
        browser.run(f"window.fetch = async () => new Response(new Blob(['{body}']).stream())")
        say(browser, "Whole?")
        assert (
            browser.run("document.querySelector('.error').textContent") == "the connection ended before the answer did"
        )
        assert browser.run("talk.at(-1)") == {"role": "assistant", "content": "half"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_can_be_read(browser: Browser, width: int, scheme: str) -> None:
    """SCREENSHOTS=folder keeps pictures."""
    wide = "| " + " | ".join(f"column_{i}" for i in range(30)) + " |\n|" + "---|" * 30 + "\n"
    text = MARKDOWN + wide + "\n```\n" + "x = 1; " * 60 + "\n```\n" + "unbroken" * 60
    with served(make_service(Saying(text))) as url:
        browser.show(width=width, scheme=scheme)
        open_page(browser, url)
        say(browser, "long" * 60)
        for is_open in ("false", "true"):
            browser.run(f"document.getElementById('settings').open = {is_open}")
            assert browser.run(OVERFLOWS) == []
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            assert browser.run("document.getElementById('log').clientHeight") > 100
        assert browser.run(CONTRASTS) == []
        if place := os.environ.get("SCREENSHOTS"):
            browser.picture(Path(place) / f"page-{width}-{scheme}-open.png")
            browser.run("$('settings').open = false; $('log').scrollTop = 0; new Promise(requestAnimationFrame)")
            browser.picture(Path(place) / f"page-{width}-{scheme}.png")


# What ends right of the window, but for what scrolls by itself.
OVERFLOWS = """[...document.querySelectorAll("body *")].filter((e) => !e.closest("pre, .table, svg") &&
  getComputedStyle(e).display !== "none" && e.getBoundingClientRect().right > innerWidth + 0.5
).map((e) => e.outerHTML.slice(0, 80))"""
# Texts whose contrast is below WCAG's 4.5.
CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(c[i] / 255), 0);
  const own = (e) => rgb(getComputedStyle(e).backgroundColor);
  const back = (e) => own(e)[3] === 0 ? back(e.parentElement) : own(e);
  const isText = (n) => n.nodeType === 3 && n.data.trim();
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.localName !== "script");
  return shown.filter((e) => [...e.childNodes].some(isText)).filter((e) => {
      const [a, b] = [light(rgb(getComputedStyle(e).color)), light(back(e))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
    }).map((e) => e.outerHTML.slice(0, 80));
})()"""
