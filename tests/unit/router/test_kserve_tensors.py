"""A request of KServe is read, or refused by an error that gRPC can carry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from protos import kserve_pb2
from router.kserve import kserve_tensors
from router.kserve.kserve_tensors import PARAMETERS, decode_request
from runtime.rpc.grpc_server import FIELD_KEY, trailers_of

NAMES = st.one_of(st.sampled_from([*PARAMETERS, "stop", "stream"]), st.text(max_size=80))
STOPS = st.lists(st.one_of(st.text(max_size=4), st.just("\ud800")), max_size=3).map(json.dumps)
VALUES = st.one_of(
    st.builds(kserve_pb2.InferParameter, bool_param=st.booleans()),
    st.builds(kserve_pb2.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(kserve_pb2.InferParameter, double_param=st.floats()),
    st.builds(kserve_pb2.InferParameter, string_param=st.one_of(st.text(max_size=20), STOPS)),
)


def request_of(**parameters: kserve_pb2.InferParameter) -> kserve_pb2.ModelInferRequest:
    request = kserve_pb2.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"hello")
    for name, value in parameters.items():
        request.parameters[name].CopyFrom(value)
    return request


def refusal_of(request: kserve_pb2.ModelInferRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        decode_request(request, 100)
    return refused.value


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.lists(st.text(max_size=80), max_size=2), st.text(max_size=80))
def test_any_request_is_read_or_refused_in_words_that_grpc_can_carry(
    parameters: dict[str, kserve_pb2.InferParameter], outputs: list[str], tensor: str
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
    refused = refusal_of(request_of(**{name: kserve_pb2.InferParameter(bool_param=True)}))
    assert f"parameters.{name}: is unknown" in str(refused)
    assert FIELD_KEY not in dict(trailers_of(refused))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("stop", '["\\ud800"]', "half a surrogate pair"),
        ("stop", "[" * 100_000, "at most 65536 characters, has 100000"),
        ("max_tokens", "9" * 100_000, "must be of type int, is str"),
        ("temperature", "x" * 100_000, "must be a number, is 'xxx"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_stays_short(name: str, value: str, says: str) -> None:
    refused = refusal_of(request_of(**{name: kserve_pb2.InferParameter(string_param=value)}))
    assert refused.field == f"parameters.{name}"
    assert says in refused.message
    assert len(str(refused)) < 300


def test_stop_strings_are_one_text_or_a_json_list() -> None:
    for text, stops in (("END", ["END"]), ("[END]", ["[END]"]), ('["a", "[b]"]', ["a", "[b]"])):
        read = decode_request(request_of(stop=kserve_pb2.InferParameter(string_param=text)), 100)
        assert list(read.generate.stop.stop_strings) == stops


class Unread(list[int]):
    """Only a slice of it may be read."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a long list is read item by item")


def test_a_million_outputs_or_dimensions_are_refused_before_they_are_read() -> None:
    request = request_of()
    request.outputs.extend([kserve_pb2.ModelInferRequest.InferRequestedOutputTensor(name="text_output")] * 17)
    assert "outputs: must have at most 16 items, has 17" in str(refusal_of(request))
    tensor = SimpleNamespace(name="text_input", shape=Unread([1] * 1000))
    with pytest.raises(InvalidRequest, match=r"shape must be \[1\] or \[1, 1\], is \[1, 1, 1, 1, 1, 1, 1, 1\]"):
        kserve_tensors._check_shape(tensor, 1)  # type: ignore[arg-type]
