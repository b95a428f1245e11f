"""The handshake of vLLM's connector, before the first hand-off.

    shake_hands        in the process of the worker
    WorkerExtension    methods for the process that computes (`--worker-extension-cls`), called between its steps

vLLM's connector shakes hands with the engine of a prefill worker when it first reads from that engine.
`WorkerExtension` lets it do so before, by one internal method of vLLM 0.32 and 0.26. Another version may lack the
method: then the first hand-off shakes hands, as it did.
"""

from __future__ import annotations

import asyncio
from typing import Any

from protos.agent_codec import encode_agent
from vllm_worker.handoff import EngineAddress
from vllm_worker.kv.parameters import decode_transfer

EXTENSION = "vllm_worker.nixl_handshake.WorkerExtension"
GREETING_TIMEOUT_S = 1.0  # of a peer that runs
TIMEOUT_S = 10.0  # vLLM gives up after 5 s without an answer
POLL_S = 0.05


async def shake_hands(llm: Any, address: EngineAddress) -> str:
    """`llm` is vLLM's AsyncLLM. Returns the error, or an empty text. Raises whatever goes wrong."""
    async with asyncio.timeout(TIMEOUT_S):
        await _greeted(address.remote_host, address.remote_port)
        engine = (address.remote_engine_id, address.remote_host, address.remote_port)
        sizes = {"tp_size": address.tp_size, "pp_size": address.pp_size}
        if address.dcp_size > 1:
            sizes["dcp_size"] = address.dcp_size  # vLLM 0.26 does not know it
        errors = await llm.collective_rpc("tandem_begin_handshake", args=engine, kwargs=sizes)
        while not any(errors):
            await asyncio.sleep(POLL_S)
            errors = await llm.collective_rpc("tandem_handshake_error")
            if None not in errors:  # every process of the engine is done
                break
    return next(filter(None, errors), "")


async def _greeted(host: str, port: int) -> None:
    """Wait until the peer greets, as each ZeroMQ socket does, unless its process is dead or stopped.

    Without an answer, vLLM's one thread for handshakes would be busy for 5 s.
    """
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await reader.readexactly(1)
            finally:
                writer.close()
    except TimeoutError as error:
        raise TimeoutError(f"{host}:{port} did not greet within {GREETING_TIMEOUT_S:g} s") from error


class WorkerExtension:
    """A base class of vLLM's worker: no name may be one of vLLM's. The methods return at once."""

    def tandem_transfer_agent(self) -> bytes:
        """The encoded address of the transfer agent of `TandemConnector` (vllm_worker/kv/); empty without one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        transfers = getattr(get_kv_transfer_group(), "transfers", None)
        return b"" if transfers is None else bytes(encode_agent(transfers.address).SerializeToString())

    def tandem_move(self, request_id: str, transfer: dict[str, Any], num_known_tokens: int) -> None:
        """`Engine.move`. `transfer`: as `encode_transfer` makes it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        decoded = decode_transfer(transfer)
        assert decoded is not None
        get_kv_transfer_group().handoffs.begin_move(request_id, decoded, num_known_tokens)

    def tandem_stay(self, request_id: str, transfer_id: str) -> None:
        """`Engine.stay`. `transfer_id`: in hexadecimal digits."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().handoffs.end_move(request_id, int(transfer_id, 16))

    def tandem_give_prefix(self, transfer: dict[str, Any], token_ids: list[int], cache_salt: str) -> None:
        """`Engine.give_prefix`. `transfer`: as `encode_transfer` makes it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        decoded = decode_transfer(transfer)
        assert decoded is not None
        get_kv_transfer_group().handoffs.give_prefix(decoded, token_ids, cache_salt)

    def tandem_begin_handshake(self, engine_id: str, host: str, port: int, **sizes: int) -> str:
        """Begin a handshake on the connector's own thread. Returns why not; empty if it has begun.

        The sizes go by name: vLLM 0.26 took the third one for another parameter, and its first hand-off ended the
        engine.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = getattr(get_kv_transfer_group(), "connector_worker", None)
        try:
            self._tandem_handshake = connector._ensure_handshake(engine_id, host, port, **sizes)  # None: done before
        except (AttributeError, TypeError):
            return "this version of vLLM shakes hands in another way"
        return ""

    def tandem_handshake_error(self) -> str | None:
        """Of the last handshake: empty if it is done, None while it runs."""
        if self._tandem_handshake is None:
            return ""
        if not self._tandem_handshake.done():
            return None
        error = self._tandem_handshake.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"
