"""The dashboard in a real Chromium, over a gateway and a fleet of this process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Request, async_playwright, expect

from cli.compose import build_router
from core.config import ApiKeyConfig
from gateway.fleets import Fleets
from tests.support.deployment import Deployment, deploy, place, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway
from tests.support.ports import kept_port

CHROMIUM = Path("/usr/bin/chromium")
# Chromium asks its maker for updates and lists unless told not to.
FLAGS = [
    "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
]  # fmt: skip
KEY = "an-operator's-key-of-this-test"
MAX_BYTES = 200_000
MISSING = "\u2013"
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 360, "height": 740}
WATCH_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => window.shifts.push(...list.getEntries().filter((entry) => !entry.hadRecentInput)))
    .observe({ type: "layout-shift", buffered: true });
"""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed: make tools"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=60_000)  # for a busy machine, whose browser is slow
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Deployment, str]]:
    """A fleet that has answered some requests, and the URL of its gateway."""
    async with deploy(tiny_config()) as deployment, serving_gateway(Fleets([deployment.router.calls])) as url:
        for number in range(4):
            await deployment.generate(text=f"a prompt of some length, number {number}", max_tokens=6)
        yield deployment, url


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, size: Any = DESKTOP, **options: Any) -> AsyncIterator[Page]:
    """The dashboard with data on it. Any error on its console fails the test, but for answers with an error status."""
    context = await browser.new_context(viewport=size, **options)
    page = await context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    await page.add_init_script(WATCH_SHIFTS)
    try:
        await page.goto(f"{url}/dashboard")
        yield page
        assert not [error for error in errors if not error.startswith("Failed to load resource")]
    finally:
        await context.close()


async def shift_of(page: Page) -> float:
    return float(await page.evaluate("window.shifts.reduce((sum, entry) => sum + entry.value, 0)"))


async def test_it_loads_small_and_updates_without_a_shift(browser: Browser, shared: tuple[Deployment, str]) -> None:
    deployment, url = shared
    async with opened(browser, "about:blank#") as page:
        sizes: list[asyncio.Task[Any]] = []

        def note_size(request: Request) -> None:
            sizes.append(asyncio.ensure_future(request.sizes()))

        page.on("requestfinished", note_size)
        await page.goto(f"{url}/dashboard")
        await expect(page.locator(".pool")).to_have_count(2)
        await expect(page.locator(".worker")).to_have_count(2)
        await expect(page.locator(".worker .state").first).to_have_text("serving")
        await expect(page.locator(".request:not(.vacant)")).to_have_count(4)
        loaded = sum(size["responseBodySize"] for size in await asyncio.gather(*sizes))
        assert 20_000 < loaded < MAX_BYTES
        await deployment.generate(text="one more, while the page looks", max_tokens=24, request_id="newest")
        await expect(page.locator(".request button").first).to_have_text("newest")
        await expect(page.locator("#plot-ttft .legend b").first).not_to_have_text(MISSING)
        await expect(page.locator("#status-text")).to_contain_text("Live")
        assert await shift_of(page) < 0.01


async def test_a_click_opens_the_spans_and_the_reasons(browser: Browser, shared: tuple[Deployment, str]) -> None:
    deployment, url = shared
    name = "<img src=x onerror=alert(1)>"
    await deployment.generate(text="a prompt for a closer look", max_tokens=4, request_id=name)
    async with opened(browser, url) as page:
        row = page.locator(".request button", has_text="onerror").first
        await row.click()
        dialog = page.locator("#trace")
        await expect(dialog.locator("h2")).to_have_text(f"Request {name}")
        await expect(dialog.locator(".span")).not_to_have_count(0)
        names = await dialog.locator(".span .name").all_inner_texts()
        assert {"tandem.request", "prefill_worker.prefill", "decode_worker.decode"} <= set(names)
        await expect(dialog.locator(".reasons .chosen")).to_have_count(1)
        await expect(dialog.locator(".reasons")).to_contain_text("predicted cost")
        await dialog.locator(".span summary").first.click()
        await expect(dialog.locator(".span[open] .attributes")).to_contain_text("process")
        await dialog.get_by_role("button", name="Spans as a table").click()
        await expect(dialog.locator("section table").first).to_be_visible()
        assert await page.locator("img[src=x]").count() == 0
        assert await shift_of(page) < 0.01


async def test_the_keyboard_reaches_everything(browser: Browser, shared: tuple[Deployment, str]) -> None:
    _, url = shared
    async with opened(browser, url) as page:
        await expect(page.locator(".request:not(.vacant)").nth(1)).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        reached = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate("document.activeElement.id || document.activeElement.className"))
            ring = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert ring == "solid", f"{reached[-1]} shows no focus"
            if reached[-1] == "link":
                break
        assert {"key-button", "theme", "link"} <= set(reached)
        await page.keyboard.press("ArrowDown")
        await expect(page.locator(".request button").nth(1)).to_be_focused()
        await expect(page.locator("#requests-note")).to_contain_text("Paused")
        await page.keyboard.press("Enter")
        await expect(page.locator("#trace .span").first).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("#trace")).not_to_be_visible()
        await expect(page.locator(".request button").nth(1)).to_be_focused()


async def test_a_phone_scrolls_in_one_direction(browser: Browser, shared: tuple[Deployment, str]) -> None:
    _, url = shared
    async with opened(browser, url, PHONE, has_touch=True, is_mobile=True, reduced_motion="reduce") as page:
        await expect(page.locator(".request:not(.vacant)").first).to_be_visible()
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not await page.evaluate(wide)
        await page.get_by_role("button", name="TTFT as a table").click()
        await expect(page.locator("#plot-ttft tbody tr")).not_to_have_count(0)
        await page.get_by_role("button", name="Decode pool: KV blocks as a table").click()
        assert not await page.evaluate(wide)
        assert await shift_of(page) < 0.01
        await page.locator(".request button").first.click()
        await expect(page.locator("#trace .span").first).to_be_visible()
        assert not await page.evaluate("document.querySelector('#trace').scrollWidth > innerWidth")


async def test_it_is_dark_or_light_as_asked(browser: Browser, shared: tuple[Deployment, str]) -> None:
    _, url = shared
    background = "getComputedStyle(document.body).backgroundColor"
    async with opened(browser, url, color_scheme="dark") as page:
        dark = await page.evaluate(background)
        await page.get_by_label("Theme").select_option("light")
        light = await page.evaluate(background)
        assert sum(map(int, light[4:-1].split(","))) > 600 > 150 > sum(map(int, dark[4:-1].split(",")))
        await page.reload()
        assert await page.evaluate(background) == light


async def test_it_shows_a_dead_worker_and_goes_on(browser: Browser) -> None:
    async with deploy(tiny_config(), num_decode=2) as deployment:
        async with serving_gateway(Fleets([deployment.router.calls])) as url, opened(browser, url) as page:
            await expect(page.locator(".state", has_text="serving")).to_have_count(4)  # the router is the fourth
            await deployment.decode[0].stop()
            await expect(page.locator(".worker .state", has_text="lost")).to_have_count(1)
            await deployment.generate(text="the other one serves", max_tokens=4, request_id="after-the-loss")
            await expect(page.locator(".request button").first).to_have_text("after-the-loss")
            await expect(page.locator(".worker")).to_have_count(3)
            assert await shift_of(page) < 0.01


async def test_it_outlives_a_router(browser: Browser) -> None:
    with kept_port("127.0.0.1") as port:
        config = tiny_config(port=port)
        async with deploy(config) as deployment:
            await deployment.generate(text="of the first router", max_tokens=4, request_id="before")
            async with serving_gateway(over_the_wire(deployment.router_address)) as url, opened(browser, url) as page:
                await expect(page.locator(".request button").first).to_have_text("before")
                await deployment.router.stop()
                await expect(page.locator("#status-text")).to_contain_text("cannot reach a router since")
                await expect(page.locator(".request button").first).to_have_text("before")
                router = build_router(config, place(0))
                try:
                    await router.start()
                    await router.set_workers(list(deployment.endpoints.values()))
                    await expect(page.locator("#status-text")).to_contain_text("Live")
                    again = replace(deployment, router=router)
                    await again.generate(text="of the second router", max_tokens=4, request_id="after")
                    await expect(page.locator(".request button").first).to_have_text("after")
                    await expect(page.locator(".request button").nth(1)).to_have_text("before")
                finally:
                    await router.stop()


async def test_it_asks_for_the_key_of_an_operator(browser: Browser) -> None:
    keys = (ApiKeyConfig("ops", hashlib.sha256(KEY.encode()).hexdigest(), operator=True),)
    async with deploy(replace(tiny_config(), api_keys=keys)) as deployment:
        async with serving_gateway(Fleets([deployment.router.calls])) as url, opened(browser, url) as page:
            await expect(page.locator("#key")).to_be_visible()
            await expect(page.locator("#status-text")).to_have_text("This fleet wants an API key of an operator.")
            await page.get_by_label("Key of an operator").fill(KEY)
            await page.keyboard.press("Enter")
            await expect(page.locator(".worker")).to_have_count(2)


async def test_the_history_counts_right(browser: Browser, shared: tuple[Deployment, str]) -> None:
    """The page's own arithmetic: percentiles, rates, and a counter that starts again."""
    _, url = shared
    async with opened(browser, url) as page:
        found = await page.evaluate(
            """async () => {
                const { History, pathOf, percentile } = await import("/dashboard/static/history.js");
                const { niceTop } = await import("/dashboard/static/plot.js");
                const { duration, count } = await import("/dashboard/static/format.js");
                const history = new History();
                const blocks = { free: 6, cached: 2, held: 1, leased: 1, incoming: 0 };
                const worker = (tokens) => ({
                    id: "d", role: "decode", state: "serving", blocks, report_age_ms: 1, num_prefilled_tokens: 0,
                    num_sampled_tokens: tokens, transferred_bytes: tokens * 10, transfer_seconds: tokens / 100,
                });
                for (const [second, tokens] of [[0, 100], [1, 150], [2, 200], [3, 0], [4, 30]]) {
                    history.addFleet({ now_unix_ms: 1e12 + second * 1000, workers: [worker(tokens)] });
                }
                return {
                    ranks: [percentile([1, 2, 3, 4], 0.5), percentile([1, 2, 3, 4], 0.99), percentile([], 0.5)],
                    paths: ["migrated", "local", "unheard-of"].map((path) => pathOf({ end: "stop", path })),
                    rate: history.rates("d").sampled,
                    bucket: history.points().at(-1).bucket.sampled,
                    kv: history.points().at(-1).bucket.kv.decode,
                    tops: [0.03, 7, 21, 100].map(niceTop),
                    texts: [duration(0.4), duration(12.34), duration(61000), count(1234), duration(null)],
                };
            }"""
        )
    assert found["ranks"] == [2, 4, None]
    assert found["paths"] == ["migrated", "local", "disaggregated"]
    assert found["rate"] == 30
    assert found["bucket"] == 130
    assert found["kv"] == pytest.approx(0.2)
    assert found["tops"] == pytest.approx([0.05, 10, 25, 100])
    assert found["texts"] == ["400 µs", "12.3 ms", "1 min 1 s", "1,234", MISSING]
