"""A client without a deadline, and a client whose process is killed: every block is freed, no other stream notices."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

from tests.support.deployment import deploy
from tests.support.faults import Stream, fault_config, prompt_of, serves_on
from tests.support.processes import ROOT
from tests.support.steps import slow_down
from tests.support.waiting import until

CLIENT = """
import sys
from tandem_client import Client
from tandem_client.stubs.inference_pb2 import GenerateRequest, StopConditions, TokenIds

request = GenerateRequest(token_ids=TokenIds(ids=range(1, 71)), stop=StopConditions(max_tokens=1000, ignore_eos=True))
with Client(sys.argv[1]) as client:
    for response in client.generate(request, timeout_s=600):
        print(response.tokens.index, flush=True)
"""


async def test_a_killed_client_leaves_nothing_behind() -> None:
    """kill -9 of its process in the middle of its tokens, long before its deadline."""
    async with deploy(fault_config()) as deployment:
        slow_down(deployment.decode[0], 0.01)
        shell = deployment.router._shell
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, deployment.router_address, cwd=ROOT, stdout=PIPE
        )
        try:
            assert client.stdout is not None
            async with asyncio.timeout(60):
                while int(await client.stdout.readline()) < 5:
                    pass
            bystander = await Stream(deployment.inference, prompt_of(1), 400, timeout_s=60.0).reach(3)
            assert shell.num_open == 2
        finally:
            client.kill()
            await client.communicate()
        assert client.returncode == -9, "the client ended by itself"
        await until(lambda: shell.num_open == 1, "the router notices")
        assert not bystander.ended
        await bystander.right()
        await deployment.settle()
        await serves_on(deployment.inference)
