"""KServe v2 on the router's port, called by the client of Triton.

The client runs in a process of its own: its messages have the names of Tandem's own stubs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import kserve_pb2, kserve_pb2_grpc
from tests.support.deployment import Deployment, trailers_of

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


pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    answer = await deployment.generate(text="The capital of France is", max_tokens=16, ignore_eos=False)
    assert out == f"{answer.text}\n{answer.text}"


def infer_request(**fields: Any) -> kserve_pb2.ModelInferRequest:
    """Four greedy tokens for a short prompt, unless `fields` say otherwise."""
    contents = kserve_pb2.InferTensorContents(bytes_contents=[b"hello"])
    tensor = kserve_pb2.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=contents
    )
    parameters = {"max_tokens": kserve_pb2.InferParameter(int64_param=4)} | fields.pop("parameters", {})
    return kserve_pb2.ModelInferRequest(
        **{"model_name": MODEL, "inputs": [tensor], "parameters": parameters} | fields  # type: ignore[arg-type]
    )


PARAMETER = kserve_pb2.InferParameter


async def test_a_refused_request_has_the_status_and_the_field_of_its_error(deployment: Deployment) -> None:
    stub, invalid = kserve_pb2_grpc.GRPCInferenceServiceStub(deployment.channel), grpc.StatusCode.INVALID_ARGUMENT
    for fields, code, field in (
        ({"inputs": []}, invalid, "inputs"),
        ({"parameters": {"stream": PARAMETER(bool_param=True)}}, invalid, "parameters.stream"),
        ({"model_name": "another"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"model_version": "2"}, grpc.StatusCode.NOT_FOUND, "model"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ModelInfer(infer_request(**fields), timeout=10)
        assert (error.value.code(), trailers_of(error.value)["tandem-field"]) == (code, field)


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
