"""Take the screenshots of docs/dashboard.md: `make screenshots`.

A small fleet in this process answers chats of several users for a minute. Then Chromium opens the dashboard.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
from playwright.async_api import Browser, Page, async_playwright

from core.config import EngineConfig, SchedulerConfig, TandemConfig, TransferConfig
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.gateway import over_the_wire, serving_gateway

IMAGES = Path(__file__).parents[1] / "docs/images"
CHROMIUM = "/usr/bin/chromium"
DESKTOP, PHONE = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
NUM_CHATS = 3  # at the same time
MAX_TURNS = 4
SYSTEM = "You are a patient assistant of a library. You answer in short sentences and name the shelf of every book. "
QUESTIONS = (
    "Which novels about the sea do you have?", "Tell me more about the second one.", "Where do I find it?",
    "Is there a translation?", "Who wrote the best history of maps?", "Do you have it as an audio book?",
)  # fmt: skip


def config_of(model: str) -> TandemConfig:
    """Two workers in each pool on a machine with few cores: small steps, so prompts and answers take turns."""
    return replace(
        tiny_config(),  # every prompt moves from pool to pool
        engine=EngineConfig(model=model, kv_memory_mb=96, num_threads=1, pin_threads=False),
        scheduler=SchedulerConfig(max_batched_tokens=128, max_running=16),
        transfer=TransferConfig(),
    )


async def chat(deployment: Deployment, number: int, until: float) -> None:
    """One user after another, each with a few turns that repeat what was said before."""
    rng = random.Random(number)
    while time.monotonic() < until:
        said, user = SYSTEM * rng.randrange(1, 4), rng.choice(("catalogue", "reading-room", "kiosk"))
        for turn in range(rng.randrange(1, MAX_TURNS + 1)):
            said += f"\nUser: {rng.choice(QUESTIONS)}\nAssistant:"
            impatient = rng.random() < 0.04
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await deployment.generate(
                    timeout_s=0.2 if impatient else 60, text=said, max_tokens=rng.randrange(8, 40), user=user,
                    request_id=f"{user}-{number}{rng.randrange(1000):03d}-{turn}",
                )  # fmt: skip
                said += answer.text
            await asyncio.sleep(rng.expovariate(2.0))  # the user reads


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, size: dict[str, int], scale: float, scheme: str) -> AsyncIterator[Page]:
    context = await browser.new_context(
        viewport={"width": size["width"], "height": size["height"]}, device_scale_factor=scale,
        color_scheme="dark" if scheme == "dark" else "light",
    )  # fmt: skip
    page = await context.new_page()
    await page.goto(f"{url}/dashboard")
    yield page
    await context.close()


async def shoot(page: Page, name: str) -> None:
    await page.screenshot(path=IMAGES / f"dashboard-{name}.png")


async def take(url: str, seconds: float) -> None:
    """Watch for `seconds`, so that the plots are full, and save the images."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        async with (
            opened(browser, url, DESKTOP, 1, "light") as light,
            opened(browser, url, DESKTOP, 1, "dark") as dark,
            opened(browser, url, PHONE, 1.5, "light") as phone,
        ):
            await light.locator(".request:not(.vacant)").nth(11).wait_for(timeout=60_000)
            await asyncio.sleep(seconds)
            await shoot(light, "light")
            await dark.locator("#plots").evaluate("element => element.scrollIntoView()")
            await dark.evaluate("scrollBy(0, -56)")
            await shoot(dark, "dark")
            await shoot(phone, "phone")
            row = light.locator(".request", has_text="disaggregated").nth(2)
            await row.locator("button").click()
            await light.locator(".span summary .name", has_text="transfer").first.click(timeout=5_000)
            await light.mouse.move(0, 0)
            await shoot(light, "request")
        await browser.close()


async def main(model: str, seconds: float) -> None:
    IMAGES.mkdir(exist_ok=True)
    async with deploy(config_of(model), num_prefill=2, num_decode=2) as deployment:
        async with serving_gateway(over_the_wire(deployment.router_address)) as url:
            until = time.monotonic() + 3 * seconds
            chats = [asyncio.create_task(chat(deployment, number, until)) for number in range(NUM_CHATS)]
            try:
                await take(url, seconds)
            finally:
                for task in chats:
                    task.cancel()
                await asyncio.gather(*chats, return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen3-tiny")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    asyncio.run(main(given.model, given.seconds))
