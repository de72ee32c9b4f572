"""The live page in a real browser, under traffic: numbers move, nothing else is fetched, everything can be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from microbatch.serving.decisions.metrics import Metrics
from microbatch.serving.decisions.policies import launch_when_free
from microbatch.serving.decisions.view import Decision, QueueView
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.web.live import FRESH
from tests.browsing import IN_A_BROWSER, SCREENS, faults_of, spoil
from tests.web.running import running

pytestmark = IN_A_BROWSER

PATIENCE = 60.0
NUMBER = '[data-chart="throughput"] .up span >> nth=1'


def modelled(items: list[Any]) -> list[Any]:
    """As long as a model might take."""
    time.sleep(0.002 + 0.0002 * len(items))
    if "bad" in items:
        raise ValueError("no number")
    return items


class Asked(DynamicBatcher):
    """Counts how often somebody wants its metrics."""

    asked = 0

    def metrics(self) -> Metrics:
        self.asked += 1
        return super().metrics()


@contextmanager
def traffic(engine: DynamicBatcher, clients: int = 8) -> Iterator[None]:
    """Clients that ask again as soon as they are answered."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            engine.call(1)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Seen:
    """A page, and what happened to it that must not."""

    def __init__(self, browser: Browser, url: str, width: int = 1280, theme: Any = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.text("body")
            self.page.wait_for_timeout(50)

    def shown(self) -> None:
        """Until there are rates."""
        self.until(lambda: self.page.locator(".fact .value").count() > 0 and "…" not in self.text(".facts"))


@contextmanager
def looking(browser: Browser, url: str, width: int = 1280, theme: Any = "light") -> Iterator[Seen]:
    seen = Seen(browser, url, width, theme)
    try:
        yield seen
    finally:
        seen.page.close()


def answered(page: Page) -> int:
    text = page.locator(".counts div", has_text="answered").locator("dd").inner_text()
    return int("".join(filter(str.isdigit, text)))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    engine = DynamicBatcher(modelled, name="modelled", examples=[1], max_batch_size=8, latency_target=0.5)
    with running({"modelled": engine}) as url, traffic(engine):
        yield f"{url}/"


def test_numbers_move_and_nothing_else_is_fetched(server: str, browser: Browser) -> None:
    with looking(browser, server) as seen:
        seen.shown()
        assert seen.text(".state") == "ready"
        assert "items per second" in seen.text(".sentence")
        before, line = answered(seen.page), seen.page.locator('[data-chart="throughput"] .line').get_attribute("d")
        seen.until(lambda: answered(seen.page) > before)
        seen.until(lambda: seen.page.locator('[data-chart="throughput"] .line').get_attribute("d") != line)
        assert seen.page.locator('[data-chart="reasons"] .label').count() > 0
        assert seen.page.locator('[data-chart="sizes"] .label').count() > 0
        assert seen.page.locator('[data-chart="curve"] .dots path').count() > 0
        assert seen.page.title() == "modelled: ready"
        assert seen.errors == []
        assert seen.requests == [server, f"{server}live"]


@pytest.mark.parametrize(("width", "theme"), SCREENS)
def test_the_page_can_be_read(width: int, theme: str, server: str, browser: Browser) -> None:
    with looking(browser, server, width, theme) as seen:
        seen.shown()
        faults = faults_of(seen.page)
        assert not any(faults.values()), faults


SPOILERS = (
    (".facts { margin-top: -40px }", "overlaps"),
    (".hint { color: #aaaaaa !important }", "contrast"),
    (".charts { width: 2000px }", "sideways"),
    (".bars { font-size: 5px }", "size"),
)


def test_faults_are_seen(server: str, browser: Browser) -> None:
    """The checks above turn red when the page is spoilt."""
    with looking(browser, server, 360) as seen:
        seen.shown()
        for style, fault in SPOILERS:
            spoil(seen.page, style)
            assert faults_of(seen.page)[fault], fault
            seen.page.evaluate(
                "() => { const sheet = document.styleSheets[0]; sheet.deleteRule(sheet.cssRules.length - 1) }"
            )
        assert not any(faults_of(seen.page).values())


def test_what_a_stranger_put_on_the_page_does_not_run(server: str, browser: Browser) -> None:
    with looking(browser, server) as seen:
        seen.shown()
        seen.page.evaluate(
            "() => { const script = document.createElement('script'); try { script.textContent = 'window.ran = 1' } "
            "catch {} document.body.append(script) }"
        )
        assert seen.page.evaluate("window.ran") is None
        assert seen.errors != []


def hostile(view: QueueView) -> Decision:
    return launch_when_free(view)._replace(reason="<b>because</b> & so")


def test_names_and_reasons_are_text_and_models_stand_side_by_side(browser: Browser) -> None:
    name = "<img src=x onerror=alert(1)>"
    engines = {name: DynamicBatcher(modelled, policy=hostile), "other": DynamicBatcher(modelled)}
    with running(engines) as url:
        engines[name].map(range(10))
        engines["other"].map([1, "bad"], return_errors=True)
        with looking(browser, url) as seen:
            seen.shown()
            assert seen.page.locator("h1").all_inner_texts() == [f"{name}\nready", "other\nready"]
            assert seen.text('[data-chart="reasons"] .label') == "<b>because</b> & so"
            assert seen.page.locator(".counts").nth(1).locator("div", has_text="failed").inner_text() == "failed 1"
            assert seen.errors == []


def test_nobody_is_asked_when_nobody_looks(browser: Browser) -> None:
    engine = Asked(modelled)
    with running(engine) as url:
        with looking(browser, url) as one, looking(browser, url) as two:
            one.shown()
            two.shown()
            assert one.text(".sentence") == two.text(".sentence") == "No request yet."
            before, start = engine.asked, time.monotonic()
            one.page.wait_for_timeout(2500)
            assert (
                0 < engine.asked - before <= (time.monotonic() - start) / FRESH + 1
            )  # two viewers cost as much as one
            for seen in (one, two):
                seen.page.evaluate(
                    "() => { Object.defineProperty(document, 'hidden', {value: true, configurable: true}); "
                    "document.dispatchEvent(new Event('visibilitychange')) }"
                )
            one.page.wait_for_timeout(1200)
            hidden = engine.asked
            one.page.wait_for_timeout(1200)
            assert engine.asked == hidden
            one.page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')) }")
            one.until(lambda: engine.asked > hidden)
        time.sleep(1.2)
        closed = engine.asked
        time.sleep(1.2)
        assert engine.asked == closed


def test_a_server_that_stops_is_told_and_found_again(browser: Browser) -> None:
    with running(DynamicBatcher(modelled)) as url:
        seen = Seen(browser, url)
        seen.shown()
    # the stream has ended by itself, or the server would not have stopped
    seen.until(lambda: "No connection" in seen.text("#connection"))
    assert seen.text(".state") == "draining"
    seen.page.close()


def test_a_key_is_asked_for(browser: Browser) -> None:
    with running(DynamicBatcher(modelled), keys=["a-long-secret"]) as url, looking(browser, url) as seen:
        seen.until(lambda: seen.page.locator("#key").is_visible())
        assert seen.page.locator(".model").count() == 0
        seen.page.fill("#secret", "wrong")
        seen.page.click("#key button")
        seen.until(lambda: seen.text("#connection") == "The key was refused")
        seen.page.fill("#secret", "a-long-secret")
        seen.page.click("#key button")
        seen.shown()
        assert seen.page.locator("#key").is_hidden()
