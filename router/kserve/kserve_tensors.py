"""Tensors and parameters of KServe v2 as Tandem's own requests and responses. docs/kserve.md lists both.

Every error names the tensor or the parameter.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import InvalidRequest, ModelNotFound, quoted, shortened
from core.model_info import ModelInfo
from core.request import MAX_JSON_CHARS
from protos import kserve_pb2
from router.serving.client_json import check_value
from tandem_client.stubs import inference_pb2

TEXT_INPUT, INPUT_IDS = "text_input", "input_ids"
TEXT_OUTPUT, OUTPUT_IDS, FINISH_REASON = "text_output", "output_ids", "finish_reason"
INPUTS = {TEXT_INPUT: ("BYTES", [1]), INPUT_IDS: ("INT32", [-1])}
OUTPUTS = {TEXT_OUTPUT: ("BYTES", [1]), OUTPUT_IDS: ("INT32", [-1]), FINISH_REASON: ("BYTES", [1])}
MAX_OUTPUTS = 16  # that a request names
VERSION = "1"
FINAL = "triton_final_response"  # the parameter by which Triton's clients know the last response

# Parameter -> the part of GenerateRequest that has it ("" = the request itself), and its type.
PARAMETERS: dict[str, tuple[str, type]] = {
    "max_tokens": ("stop", int),
    "min_tokens": ("stop", int),
    "ignore_eos": ("stop", bool),
    "temperature": ("sampling", float),
    "top_p": ("sampling", float),
    "top_k": ("sampling", int),
    "min_p": ("sampling", float),
    "repetition_penalty": ("sampling", float),
    "presence_penalty": ("sampling", float),
    "frequency_penalty": ("sampling", float),
    "seed": ("sampling", int),
    "json_schema": ("output_format", str),
    "regex": ("output_format", str),
    "lark": ("output_format", str),
    "cache_salt": ("", str),
    "priority": ("", int),
    "user": ("", str),
    "speculation": ("", bool),
}
_IGNORED = ("triton_enable_empty_final_response",)  # sent by Triton's client; the last response is never empty here
_FINISH_NAMES: dict[int, str] = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class InferRequest:
    generate: inference_pb2.GenerateRequest
    stream: bool | None  # the parameter; None = not given
    outputs: frozenset[str]  # the wanted tensors


def check_model(name: str, version: str, served: ModelInfo) -> None:
    """Raise `ModelNotFound`."""
    if not name or version not in ("", VERSION):
        raise ModelNotFound(f"model {quoted(name)} version {quoted(version)} is not served here, {served.name!r} is")
    served.adapter_of(name)


def decode_request(wire: kserve_pb2.ModelInferRequest, max_tokens: int) -> InferRequest:
    """`max_tokens` bounds input_ids. Raises `InvalidRequest`."""
    request = inference_pb2.GenerateRequest(model=wire.model_name, request_id=wire.id)
    stream = _read_parameters(wire, request)
    _read_prompt(wire, request, max_tokens)
    if len(wire.outputs) > MAX_OUTPUTS:
        raise InvalidRequest("outputs", f"must have at most {MAX_OUTPUTS} items, has {len(wire.outputs)}")
    unknown = sorted({output.name for output in wire.outputs} - OUTPUTS.keys())
    if unknown:
        raise InvalidRequest(f"outputs.{shortened(unknown[0])}", f"must be one of {', '.join(OUTPUTS)}")
    wanted = frozenset(output.name for output in wire.outputs) or frozenset(OUTPUTS)
    return InferRequest(request, stream, wanted)


def _read_parameters(wire: kserve_pb2.ModelInferRequest, request: inference_pb2.GenerateRequest) -> bool | None:
    stream: bool | None = None
    for name, wrapped in wire.parameters.items():
        choice = wrapped.WhichOneof("parameter_choice")
        value = None if choice is None else getattr(wrapped, choice)
        field = f"parameters.{shortened(name)}"
        if name in _IGNORED:
            continue
        if name == "stop":
            request.stop.stop_strings.extend(_stop_strings(value))
        elif name == "stream":
            stream = bool(_typed(field, value, bool))
        elif name in PARAMETERS:
            part, kind = PARAMETERS[name]
            if part == "output_format" and request.HasField(part):
                raise InvalidRequest(field, "cannot be combined with another form of the output")
            typed = _typed(field, value, kind)
            try:
                setattr(getattr(request, part) if part else request, name, typed)
            except (ValueError, TypeError) as error:
                raise InvalidRequest(field, f"is out of range: {shortened(str(typed))}") from error
        else:
            raise InvalidRequest(field, f"is unknown; known are {', '.join([*PARAMETERS, 'stop', 'stream'])}")
    return stream


def _typed(field: str, value: object, kind: type) -> object:
    """`value`, if it is of this type. A float may be a string, because Triton's client sends no floats."""
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError as error:
            raise InvalidRequest(field, f"must be a number, is {quoted(value)}") from error
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequest(field, f"must be of type {kind.__name__}, is {type(value).__name__}")
    return value


def _stop_strings(value: object) -> list[str]:
    """One string, or a JSON array of strings: a parameter has no lists."""
    text = _typed("parameters.stop", value, str)
    assert isinstance(text, str)
    if not text.startswith("["):
        return [text]
    if len(text) > MAX_JSON_CHARS:
        raise InvalidRequest("parameters.stop", f"must have at most {MAX_JSON_CHARS} characters, has {len(text)}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
        raise InvalidRequest("parameters.stop", "must be a string, or a JSON array of strings")
    check_value("parameters.stop", found)
    return found


def _read_prompt(wire: kserve_pb2.ModelInferRequest, request: inference_pb2.GenerateRequest, max_tokens: int) -> None:
    if len(wire.inputs) != 1:
        raise InvalidRequest("inputs", f"must be one tensor, {TEXT_INPUT} or {INPUT_IDS}; has {len(wire.inputs)}")
    tensor = wire.inputs[0]
    if tensor.name not in INPUTS:
        raise InvalidRequest(f"inputs.{shortened(tensor.name)}", f"must be {TEXT_INPUT} or {INPUT_IDS}")
    if wire.raw_input_contents and len(wire.raw_input_contents) != 1:
        raise InvalidRequest("raw_input_contents", f"must have 1 item, has {len(wire.raw_input_contents)}")
    datatype, _ = INPUTS[tensor.name]
    if tensor.datatype != datatype:
        raise InvalidRequest(f"inputs.{tensor.name}", f"datatype must be {datatype}, is {quoted(tensor.datatype)}")
    raw = wire.raw_input_contents[0] if wire.raw_input_contents else None
    if tensor.name == TEXT_INPUT:
        _check_shape(tensor, 1)
        request.text = _text(tensor, raw)
    else:
        count = len(tensor.contents.int_contents) if raw is None else len(raw) // 4
        if raw is not None and len(raw) % 4:
            raise InvalidRequest("inputs.input_ids", f"must have 4 bytes for each token, has {len(raw)} bytes")
        if count > max_tokens:
            raise InvalidRequest("inputs.input_ids", f"must have at most {max_tokens} tokens, has {count}")
        _check_shape(tensor, count)
        ids: Sequence[int] = tensor.contents.int_contents if raw is None else struct.unpack(f"<{count}i", raw)
        if min(ids, default=0) < 0:
            raise InvalidRequest("inputs.input_ids", f"must be 0 or more, one is {min(ids)}")
        request.token_ids.ids.extend(ids)


def _check_shape(tensor: kserve_pb2.ModelInferRequest.InferInputTensor, count: int) -> None:
    """[count], or [1, count]: a batch of one."""
    shape = list(tensor.shape[:8])
    if shape not in ([count], [1, count]):
        raise InvalidRequest(f"inputs.{tensor.name}", f"shape must be [{count}] or [1, {count}], is {shape}")


def _text(tensor: kserve_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> str:
    field = f"inputs.{TEXT_INPUT}"
    if raw is None:
        if len(tensor.contents.bytes_contents) != 1:
            raise InvalidRequest(field, f"must have 1 element, has {len(tensor.contents.bytes_contents)}")
        content = tensor.contents.bytes_contents[0]
    else:
        if len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
            raise InvalidRequest(field, "must have 1 element that follows its length in 4 bytes")
        content = raw[4:]
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"must be UTF-8: {error.reason} at byte {error.start}") from error


def encode_response(
    model: str, request_id: str, outputs: frozenset[str], text: str, token_ids: Sequence[int], finish_reason: int
) -> kserve_pb2.ModelInferResponse:
    """`finish_reason` of inference.proto; unspecified before the end."""
    response = kserve_pb2.ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)
    if TEXT_OUTPUT in outputs:
        _add_bytes(response, TEXT_OUTPUT, text)
    if OUTPUT_IDS in outputs:
        _add(response, OUTPUT_IDS, [len(token_ids)], struct.pack(f"<{len(token_ids)}i", *token_ids))
    if FINISH_REASON in outputs:
        _add_bytes(response, FINISH_REASON, _FINISH_NAMES.get(finish_reason, ""))
    return response


def _add_bytes(response: kserve_pb2.ModelInferResponse, name: str, text: str) -> None:
    content = text.encode()
    _add(response, name, [1], struct.pack("<I", len(content)) + content)


def _add(response: kserve_pb2.ModelInferResponse, name: str, shape: list[int], raw: bytes) -> None:
    """Raw bytes, as Triton itself answers: its client cannot read every type from `contents`."""
    response.outputs.add(name=name, datatype=OUTPUTS[name][0], shape=shape)
    response.raw_output_contents.append(raw)
