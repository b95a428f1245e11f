"""KServe v2 on the router's port, called by the client of Triton.

The client runs in a process of its own: its messages have the names of Tandem's own stubs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.config import ApiKeyConfig
from protos import kserve_pb2, kserve_pb2_grpc
from tests.support.deployment import Deployment, deploy, tiny_config, trailers_of

DOCS = Path(__file__).parents[2] / "docs" / "kserve.md"
needs_client = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="needs pip install 'tritonclient[grpc]'"
)
MODEL = "fake:tiny"

# Prints one JSON object: what the asyncio client saw.
AIO_PROGRAM = """
import asyncio, json, sys
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1:]

def ids(*tokens):
    tensor = triton.InferInput("input_ids", [1, len(tokens)], "INT32")
    tensor.set_data_from_numpy(np.array([tokens], dtype=np.int32))
    return tensor

async def main():
    seen = {}
    async with triton.InferenceServerClient(address) as client:
        seen["live"] = await client.is_server_live()
        seen["ready"] = [await client.is_server_ready(), await client.is_model_ready(model)]
        seen["other_model_ready"] = await client.is_model_ready("another")
        seen["server"] = (await client.get_server_metadata(as_json=True))["name"]
        metadata = await client.get_model_metadata(model, as_json=True)
        seen["inputs"] = [tensor["name"] for tensor in metadata["inputs"]]
        limits = {"max_tokens": 6, "temperature": "0.0", "ignore_eos": True}
        answer = await client.infer(model, [ids(5, 6, 7)], parameters=limits, request_id="one")
        seen["output_ids"] = answer.as_numpy("output_ids").tolist()
        seen["finish_reason"] = answer.as_numpy("finish_reason")[0].decode()
        seen["id"] = answer.get_response().id
        try:
            await client.infer(model, [ids(5)], parameters={"temperature": "-1.0"})
        except InferenceServerException as error:
            seen["error"] = [error.status(), error.message()]

        async def requests():
            for name, parameters in (("a", limits), ("b", {"top_k": -1}), ("c", limits | {"stream": False})):
                yield {"model_name": model, "inputs": [ids(5, 6, 7)], "request_id": name, "parameters": parameters}

        streamed = {"a": [], "b": [], "c": []}
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                streamed["b"].append(error.message())
                continue
            response = result.get_response()
            if result.as_numpy("output_ids") is not None:
                streamed[response.id or "a"] += result.as_numpy("output_ids").tolist()
            if response.id == "c" and response.parameters["triton_final_response"].bool_param:
                break
        seen["streamed"] = streamed
    print(json.dumps(seen))

asyncio.run(main())
"""


async def run(program: str, *arguments: str) -> str:
    """Run a Python program to its end. Returns its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 30)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config()) as deployment:
        yield deployment
        await deployment.settle()


@needs_client
async def test_the_asyncio_client_of_triton_generates_and_streams(deployment: Deployment) -> None:
    seen = json.loads((await run(AIO_PROGRAM, deployment.router_address, MODEL)).splitlines()[-1])
    tokens = (await deployment.generate(token_ids=[5, 6, 7], max_tokens=6)).token_ids
    assert seen["live"] is True
    assert (seen["ready"], seen["other_model_ready"]) == ([True, True], False)
    assert (seen["server"], seen["inputs"]) == ("tandem", ["text_input", "input_ids"])
    assert (seen["output_ids"], seen["finish_reason"], seen["id"]) == (tokens, "length", "one")
    status, message = seen["error"]
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "temperature" in message
    assert seen["streamed"]["a"] == seen["streamed"]["c"] == tokens
    assert "parameters.top_k" in seen["streamed"]["b"][0]


@needs_client
async def test_the_program_of_the_documentation_runs(deployment: Deployment) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    program = program.replace("127.0.0.1:50051", deployment.router_address).replace("smollm2-135m", MODEL)
    out = await run(program)
    answer = await deployment.generate(text="Why is the sky blue?", max_tokens=16, ignore_eos=False)
    assert out == f"{answer.text}\n{answer.text}"


def infer_request(**fields: Any) -> kserve_pb2.ModelInferRequest:
    """Four greedy tokens for a short prompt, unless `fields` say otherwise."""
    tensor = kserve_pb2.ModelInferRequest.InferInputTensor(
        name=fields.pop("name", "text_input"), datatype=fields.pop("datatype", "BYTES"), shape=fields.pop("shape", [1])
    )
    contents = fields.pop("contents", {"bytes_contents": [b"hello"]})
    tensor.contents.CopyFrom(kserve_pb2.InferTensorContents(**contents))
    parameters = {"max_tokens": kserve_pb2.InferParameter(int64_param=4)} | fields.pop("parameters", {})
    return kserve_pb2.ModelInferRequest(
        **{"model_name": MODEL, "inputs": [tensor], "parameters": parameters} | fields  # type: ignore[arg-type]
    )


PARAMETER = kserve_pb2.InferParameter
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"inputs": []}, "inputs"),
    "another tensor": ({"name": "image"}, "inputs.image"),
    "another type": ({"datatype": "FP32"}, "inputs.text_input"),
    "two texts": ({"shape": [2], "contents": {"bytes_contents": [b"a", b"b"]}}, "inputs.text_input"),
    "no UTF-8": ({"contents": {"bytes_contents": [b"\xff"]}}, "inputs.text_input"),
    "raw bytes without a length": ({"raw_input_contents": [b"hello"]}, "inputs.text_input"),
    "a wrong shape": ({"name": "input_ids", "datatype": "INT32", "contents": {"int_contents": [1]}, "shape": [7]},
                      "inputs.input_ids"),
    "a negative id": ({"name": "input_ids", "datatype": "INT32", "contents": {"int_contents": [-1]}, "shape": [1]},
                      "inputs.input_ids"),
    "too many ids": ({"name": "input_ids", "datatype": "INT32", "raw_input_contents": [bytes(400_000)]},
                     "inputs.input_ids"),
    "an unknown parameter": ({"parameters": {"beam_width": PARAMETER(int64_param=2)}}, "parameters.beam_width"),
    "a parameter of another type": ({"parameters": {"max_tokens": PARAMETER(string_param="4")}},
                                    "parameters.max_tokens"),
    "no number": ({"parameters": {"top_p": PARAMETER(string_param="high")}}, "parameters.top_p"),
    "a negative max_tokens": ({"parameters": {"max_tokens": PARAMETER(int64_param=-4)}}, "parameters.max_tokens"),
    "a stop of numbers": ({"parameters": {"stop": PARAMETER(string_param="[1]")}}, "parameters.stop"),
    "a stream of one answer": ({"parameters": {"stream": PARAMETER(bool_param=True)}}, "parameters.stream"),
    "an unknown output": (
        {"outputs": [kserve_pb2.ModelInferRequest.InferRequestedOutputTensor(name="logits")]}, "outputs.logits"),
}  # fmt: skip


async def test_a_malformed_request_is_refused_by_name(deployment: Deployment) -> None:
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(deployment.channel)
    for case, (fields, named) in MALFORMED.items():
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ModelInfer(infer_request(**fields), timeout=10)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (case, error.value.details())
        assert trailers_of(error.value)["tandem-field"] == named, case


async def test_another_model_or_version_is_not_found(deployment: Deployment) -> None:
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(deployment.channel)
    for fields in ({"model_name": "another"}, {"model_version": "2"}):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ModelInfer(infer_request(**fields), timeout=10)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stop_strings_and_wanted_outputs(deployment: Deployment) -> None:
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(deployment.channel)
    answer = await deployment.generate(text="hello", max_tokens=24)
    stop = answer.text[4:6]
    parameters = {
        "max_tokens": PARAMETER(int64_param=24),
        "temperature": PARAMETER(double_param=0.0),
        "ignore_eos": PARAMETER(bool_param=True),
        "stop": PARAMETER(string_param=json.dumps([stop])),
    }
    wanted = [kserve_pb2.ModelInferRequest.InferRequestedOutputTensor(name="text_output")]
    response = await stub.ModelInfer(infer_request(parameters=parameters, outputs=wanted), timeout=10)
    (raw,) = response.raw_output_contents
    assert [output.name for output in response.outputs] == ["text_output"]
    assert raw[4:].decode() == answer.text[: answer.text.index(stop)]


async def test_a_client_that_goes_away_frees_everything(deployment: Deployment) -> None:
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(deployment.channel)
    call = stub.ModelStreamInfer(timeout=30)
    await call.write(infer_request(parameters={"max_tokens": PARAMETER(int64_param=400)}))
    await call.read()
    call.cancel()  # the fixture waits until nothing is open


async def test_an_api_key_guards_generation_and_not_the_descriptions() -> None:
    key = "a-key-of-a-client-1234"
    config = replace(tiny_config(), api_keys=(ApiKeyConfig("client", sha256(key.encode()).hexdigest()),))
    async with deploy(config) as deployment:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(deployment.channel)
        assert (await stub.ServerReady(kserve_pb2.ServerReadyRequest(), timeout=10)).ready
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ModelInfer(infer_request(), timeout=10)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.ModelStreamInfer(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = [("authorization", f"Bearer {key}")]
        answer = await stub.ModelInfer(infer_request(), timeout=10, metadata=metadata)
        assert len(answer.outputs) == 3
