"""Complete three prompts at the same time: python examples/python_async.py [host:port of a router]"""

import asyncio
import os
import sys

from tandem_client import AsyncClient, CallFailed, Credentials

PROMPTS = ("The capital of France is", "Water boils at", "The first prime numbers are")


async def main(address: str) -> None:
    credentials = Credentials(api_key=os.environ.get("TANDEM_API_KEY", ""))
    async with AsyncClient(address, credentials) as client:
        calls = [client.complete(prompt, timeout_s=60, max_tokens=12, temperature=0) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*calls), strict=True):
            print(f"{prompt} ... {answer.usage.completion_tokens} tokens: {answer.text!r}")


try:
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
except CallFailed as error:
    sys.exit(f"{error.code.name}: {error}")
