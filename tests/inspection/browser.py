"""A real browser for tests: one Chromium per file, and visits that keep what a page asks for and says."""

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROBES = Path(__file__).parent / "explorer" / "probes.js"


def find_chromium() -> str | None:
    names = (os.environ.get("CHROMIUM", "chromium"), "chromium", "google-chrome", "chromium-browser")
    return next(filter(None, map(shutil.which, names)), None)


@dataclass
class Visit:
    """One tab: what it asked for, what it complained of, and the page."""

    page: Any
    allowed: str  # addresses that begin so are fetched, all others are refused
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    session: Any = None
    opened: float = 0.0  # seconds of the page's own work until it could be used

    def evaluate(self, expression: str, argument: Any = None) -> Any:
        return self.page.evaluate(expression, argument)

    def probe(self, name: str, argument: Any = None) -> Any:
        return self.page.evaluate("([name, argument]) => window.probe[name](argument)", [name, argument])

    def busy(self) -> float:
        """Seconds that the page's main thread has computed: other work on the machine does not count."""
        if self.session is None:
            self.session = self.page.context.new_cdp_session(self.page)
            self.session.send("Performance.enable", {"timeDomain": "threadTicks"})
        metrics = self.session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def settle(self) -> None:
        """Wait until the page has had two frames and the work they started."""
        for _ in range(4):
            if self.probe("drawn"):
                return
            self.page.bring_to_front()  # a browser draws no frames of a tab that it takes for hidden
        raise AssertionError("the page drew no frame in 60 s")

    def until(self, expression: str, seconds: float = 10.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < end, f"waited {seconds} s for {expression}"
            time.sleep(0.02)
        return found

    def check(self) -> None:
        assert not self.complaints, "\n".join(self.complaints)


@dataclass
class Browser:
    chromium: Any

    def visit(self, address: str, allowed: str | None = None, ready: bool = True, **settings: Any) -> Visit:
        """Open an address; requests to what does not begin as `allowed`, or as it, are refused and noted.

        `ready` waits until the explorer is there; `settings` are the context's, such as color_scheme.
        """
        settings = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1, **settings}
        context = self.chromium.new_context(**settings)
        context.add_init_script(path=PROBES)
        page = context.new_page()
        page.set_default_timeout(15_000)
        visit = Visit(page, address if allowed is None else allowed)

        def serve(route: Any) -> None:
            url = route.request.url
            visit.requests.append(url)
            if url.startswith(visit.allowed):
                route.continue_()
            else:
                visit.complaints.append(f"asked for {url[:200]}")
                route.abort()

        def listen(message: Any) -> None:
            # Chromium's advice on reading pixels is meant for the probes.
            if message.type in ("error", "warning") and "willReadFrequently" not in message.text:
                visit.complaints.append(f"{message.type}: {message.text}")

        page.route("**/*", serve)
        page.on("console", listen)
        page.on("pageerror", lambda error: visit.complaints.append(f"thrown: {error}"))
        visit.busy()
        page.goto(address)
        if ready:
            self.wait(page)
            visit.opened = visit.busy()
            visit.settle()
        return visit

    def wait(self, frame: Any) -> None:
        """Wait for the explorer of a page or frame."""
        frame.evaluate("probe.opened()")

    def close(self, visit: Visit) -> None:
        visit.page.context.close()


@pytest.fixture(scope="module")
def browser():
    """Chromium for the tests of one file; without one they are skipped, or fail where REQUIRE_BROWSER=1."""
    path = find_chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        path = None
    if path is None:
        told = "needs Chromium and playwright: apt-get install chromium, pip install playwright"
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip)(told)
    with sync_playwright() as playwright:
        # The tests share few cores, so nothing runs that draws no page.
        chromium = playwright.chromium.launch(executable_path=path, args=["--disable-gpu"])
        yield Browser(chromium)
        chromium.close()
