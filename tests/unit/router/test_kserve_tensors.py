"""A request of KServe is read, or refused by an error that gRPC can carry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from protos.kserve_pb2 import InferParameter, InferTensorContents, ModelInferRequest
from router.kserve import kserve_tensors
from router.kserve.kserve_tensors import PARAMETERS, decode_request
from runtime.rpc.grpc_server import FIELD_KEY, trailers_of

OUTPUT = ModelInferRequest.InferRequestedOutputTensor
NAMES = st.one_of(st.sampled_from([*PARAMETERS, "stop", "stream"]), st.text(max_size=80))
STOPS = st.lists(st.one_of(st.text(max_size=4), st.just("\ud800")), max_size=3).map(json.dumps)
VALUES = st.one_of(
    st.builds(InferParameter, bool_param=st.booleans()),
    st.builds(InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(InferParameter, double_param=st.floats()),
    st.builds(InferParameter, string_param=st.one_of(st.text(max_size=20), STOPS)),
)
IDS: dict[str, Any] = {"name": "input_ids", "datatype": "INT32", "shape": [1]}


def tensor_of(*texts: bytes, ids: tuple[int, ...] = (), **fields: Any) -> ModelInferRequest.InferInputTensor:
    contents = InferTensorContents(bytes_contents=texts, int_contents=ids)
    named: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": contents}
    return ModelInferRequest.InferInputTensor(**named | fields)


def request_of(
    tensor: ModelInferRequest.InferInputTensor | None = None, /, **parameters: InferParameter
) -> ModelInferRequest:
    return ModelInferRequest(model_name="m", inputs=[tensor or tensor_of(b"hello")], parameters=parameters)


def refusal_of(request: ModelInferRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        decode_request(request, 100)
    return refused.value


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.lists(st.text(max_size=80), max_size=2), st.text(max_size=80))
def test_any_request_is_read_or_refused_in_words_that_grpc_can_carry(
    parameters: dict[str, InferParameter], outputs: list[str], tensor: str
) -> None:
    request = request_of(**parameters)
    for name in outputs:
        request.outputs.add(name=name)
    if len(parameters) % 2:
        request.inputs[0].name = tensor
    refused = None
    try:
        decode_request(request, 100)
    except InvalidRequest as error:
        refused = error
    trailers = () if refused is None else trailers_of(refused)
    assert len(str(refused)) < 1000
    assert [value for _, value in trailers if not (value.isascii() and value.isprintable())] == []


@pytest.mark.parametrize("name", ["größe", "a\nb", "\x00"])
def test_a_name_that_is_no_header_value_is_in_the_message_only(name: str) -> None:
    refused = refusal_of(request_of(**{name: InferParameter(bool_param=True)}))
    assert f"parameters.{name}: is unknown" in str(refused)
    assert FIELD_KEY not in dict(trailers_of(refused))


MALFORMED: list[tuple[ModelInferRequest, str, str]] = [
    (ModelInferRequest(), "inputs", "must be one tensor"),
    (request_of(tensor_of(b"a", name="image")), "inputs.image", "text_input"),
    (request_of(tensor_of(b"a", datatype="FP32")), "inputs.text_input", "BYTES"),
    (request_of(tensor_of(b"a", b"b", shape=[2])), "inputs.text_input", "[1]"),
    (request_of(tensor_of(b"\xff")), "inputs.text_input", "UTF-8"),
    (ModelInferRequest(inputs=[tensor_of()], raw_input_contents=[b"hello"]), "inputs.text_input", "4 bytes"),
    (request_of(tensor_of(ids=(1,), **IDS | {"shape": [7]})), "inputs.input_ids", "shape"),
    (request_of(tensor_of(ids=(-1,), **IDS)), "inputs.input_ids", "0 or more"),
    (ModelInferRequest(inputs=[tensor_of(**IDS)], raw_input_contents=[bytes(404)]), "inputs.input_ids", "has 101"),
    (request_of(beam_width=InferParameter(int64_param=2)), "parameters.beam_width", "is unknown"),
    (request_of(top_p=InferParameter(string_param="high")), "parameters.top_p", "must be a number, is 'high'"),
    (request_of(max_tokens=InferParameter(int64_param=-4)), "parameters.max_tokens", "out of range"),
    (request_of(max_tokens=InferParameter(bool_param=True)), "parameters.max_tokens", "type int, is bool"),
    (request_of(max_tokens=InferParameter(string_param="9" * 100_000)), "parameters.max_tokens", "type int, is str"),
    (request_of(temperature=InferParameter(string_param="x" * 100_000)), "parameters.temperature", "number, is 'xxx"),
    (request_of(stream=InferParameter(string_param="yes")), "parameters.stream", "type bool, is str"),
    (request_of(stop=InferParameter(string_param="[1]")), "parameters.stop", "array of strings"),
    (request_of(stop=InferParameter(string_param='["\\ud800"]')), "parameters.stop", "half a surrogate pair"),
    (
        request_of(stop=InferParameter(string_param="[" * 100_000)),
        "parameters.stop",
        "at most 65536 characters, has 100000",
    ),
    (ModelInferRequest(inputs=[tensor_of(b"a")], outputs=[OUTPUT(name="logits")]), "outputs.logits", "one of"),
]


def test_a_refusal_names_what_is_wrong_and_stays_short() -> None:
    for wire, field, says in MALFORMED:
        refused = refusal_of(wire)
        assert (refused.field, says in refused.message) == (field, True), refused
        assert len(str(refused)) < 300


def test_what_tritons_client_adds_is_ignored() -> None:
    sent = {"triton_enable_empty_final_response": InferParameter(bool_param=True)}
    assert decode_request(request_of(**sent), 100) == decode_request(request_of(), 100)


def test_stop_strings_are_one_text_or_a_json_list() -> None:
    for text, stops in (("END", ["END"]), ("[END]", ["[END]"]), ('["a", "[b]"]', ["a", "[b]"])):
        read = decode_request(request_of(stop=InferParameter(string_param=text)), 100)
        assert list(read.generate.stop.stop_strings) == stops


class Unread(list[int]):
    """Only a slice of it may be read."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a long list is read item by item")


def test_a_million_outputs_or_dimensions_are_refused_before_they_are_read() -> None:
    request = request_of()
    request.outputs.extend([OUTPUT(name="text_output")] * 17)
    assert "outputs: must have at most 16 items, has 17" in str(refusal_of(request))
    tensor = SimpleNamespace(name="text_input", shape=Unread([1] * 1000))
    with pytest.raises(InvalidRequest, match=r"shape must be \[1\] or \[1, 1\], is \[1, 1, 1, 1, 1, 1, 1, 1\]"):
        kserve_tensors._check_shape(tensor, 1)  # type: ignore[arg-type]
