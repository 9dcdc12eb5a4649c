"""Turns protobuf messages into what the engine takes, and its outputs into messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.request import FinishReason, SamplingParams, StructuredOutput
from engine.serving import outputs
from proto.treadle.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from engine.core import EngineInfo
    from engine.serving.frontend import Prompt

_TO_WIRE: Mapping[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
FINISH_REASONS: Mapping[int, FinishReason] = {value: name for name, value in _TO_WIRE.items()}
"""Finish reason by its number on the wire."""


def prompt(message: pb.GenerateRequest) -> Prompt:
    """Text or ids of a request.

    Raises:
      ValueError: it has neither.
    """
    return _either(message, "prompt", {"text": "text", "token_ids": "token_ids"})


def score_pair(item: pb.ScoreItem) -> tuple[str | list[int], str | list[int]]:
    """Prompt and continuation.

    Raises:
      ValueError: one of them is missing.
    """
    pair = [
        _either(item, name, {"text": f"{name}_text", "token_ids": f"{name}_ids"})
        for name in ("prompt", "continuation")
    ]
    return pair[0], pair[1]


def _either(message: Any, oneof: str, names: Mapping[str, str]) -> Any:
    match message.WhichOneof(oneof):
        case None:
            raise ValueError(f"{oneof} is missing; set {' or '.join(names.values())}")
        case field if field == names["text"]:
            return getattr(message, field)
        case field:
            return list(getattr(message, field).ids)


def params_fields(message: pb.SamplingParams) -> dict[str, Any]:
    """The sampling parameters that the caller set; the others keep the model's defaults."""
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, pb.TokenIds):
        return tuple(value.ids)
    if isinstance(value, pb.StructuredOutput):
        return _structure(value)
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(_plain(one) for one in value)


def _structure(message: pb.StructuredOutput) -> StructuredOutput:
    kind: Any = message.WhichOneof("form")
    match kind:
        case "choice":
            return StructuredOutput(kind, choices=tuple(message.choice.texts))
        case "json_object":
            if not message.json_object:
                raise ValueError("structured.json_object is false; leave structured out")
            return StructuredOutput(kind)
        case None:
            raise ValueError(
                "structured is empty; set json_schema, json_object, regex, grammar or choice"
            )
        case _:
            return StructuredOutput(kind, getattr(message, kind))


def params_message(params: SamplingParams | Mapping[str, Any] | None) -> pb.SamplingParams:
    """Sampling parameters for the wire.

    Args:
      params: all fields of a `SamplingParams` are sent, so that the server applies no default of
        its own; of a mapping, those it names.

    Raises:
      ValueError: naming an unknown field, or one that the wire cannot carry.
    """
    message = pb.SamplingParams()
    for name, value in _named(params):
        if value is None:
            continue
        if name not in pb.SamplingParams.DESCRIPTOR.fields_by_name:
            known = ", ".join(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)
            raise ValueError(f"params has unknown field {name!r}; known are {known}")
        try:
            _set(message, name, value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name} is {value!r}, which cannot be sent: {error}") from None
    return message


def _named(params: SamplingParams | Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    if isinstance(params, SamplingParams):
        return vars(params).items()
    return () if params is None else params.items()


def _set(message: pb.SamplingParams, name: str, value: Any) -> None:
    match name:
        case "logit_bias":
            message.logit_bias.update(value)
        case "allowed_token_ids":
            message.allowed_token_ids.ids.extend(value)
            message.allowed_token_ids.SetInParent()
        case "bad_word_ids":
            message.bad_word_ids.extend(pb.TokenIds(ids=ids) for ids in value)
        case "bad_words" | "stop" | "stop_token_ids":
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        case "seed":
            message.seed = value % 2**64
        case "structured":
            _set_structure(message.structured, value)
        case _:
            setattr(message, name, value)


def _set_structure(
    message: pb.StructuredOutput, value: StructuredOutput | Mapping[str, Any]
) -> None:
    structured = value if isinstance(value, StructuredOutput) else StructuredOutput(**value)
    match structured.kind:
        case "choice":
            message.choice.texts.extend(structured.choices)
        case "json_object":
            message.json_object = True
        case kind:
            setattr(message, kind, structured.text)


def generate_response(
    output: outputs.RequestOutput, params: Mapping[str, Any], *, is_first: bool
) -> pb.GenerateResponse:
    """One message of a stream, without usage.

    Args:
      output: what is new, or everything where the caller asked for one message.
      params: the fields the caller set.
      is_first: it tells about the prompt and the seed.
    """
    message = pb.GenerateResponse(request_id=output.request_id)
    message.choices.extend(_choice(one, params.get("logprobs") or 0) for one in output.outputs)
    if is_first:
        message.seed = output.seed
        message.prompt.token_ids.extend(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        num_top = params.get("prompt_logprobs") or 0
        first = pb.TokenLogprob(token_id=output.prompt_token_ids[0])
        message.prompt.logprobs.extend(
            first if position is None else _token_logprob(position, num_top)
            for position in output.prompt_logprobs
        )
    return message


def usage(output: outputs.RequestOutput, num_output_tokens: int) -> pb.Usage:
    """Counts and times of a finished request.

    Args:
      output: its last output.
      num_output_tokens: over all choices and all messages.
    """
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        completion_tokens=num_output_tokens,
        time_to_first_token_seconds=output.metrics.ttft or 0.0,
        total_seconds=output.metrics.e2e or 0.0,
    )


def _choice(choice: outputs.CompletionOutput, num_top: int) -> pb.Choice:
    message = pb.Choice(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=[_token_logprob(position, num_top) for position in choice.logprobs or ()],
        cumulative_logprob=choice.cumulative_logprob,
    )
    if choice.finish_reason is not None:
        message.finish_reason = _TO_WIRE[choice.finish_reason]
    if isinstance(choice.stop_reason, str):
        message.stop_string = choice.stop_reason
    elif choice.stop_reason is not None:
        message.stop_token_id = choice.stop_reason
    return message


def _token_logprob(position: outputs.PositionLogprobs, num_top: int) -> pb.TokenLogprob:
    token_id, chosen = next(iter(position.items()))
    likeliest = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
    return pb.TokenLogprob(
        token_id=token_id,
        logprob=chosen.logprob,
        rank=chosen.rank,
        token_bytes=chosen.bytes,
        top=[
            pb.TopLogprob(token_id=one, logprob=scored.logprob, token_bytes=scored.bytes)
            for one, scored in likeliest
        ],
    )


def score_result(output: outputs.ScoreOutput) -> pb.ScoreResult:
    """The log-likelihood of one continuation."""
    return pb.ScoreResult(
        logprob=output.logprob,
        is_greedy=output.is_greedy,
        token_ids=output.token_ids,
        token_logprobs=output.token_logprobs,
    )


def model_info(info: EngineInfo, eos_ids: Sequence[int]) -> pb.GetModelInfoResponse:
    """What is served."""
    return pb.GetModelInfoResponse(
        model_name=info.model_name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=eos_ids,
        dtype=info.dtype,
        num_parameters=info.num_parameters,
        weights_version=info.weights_version,
        generation_defaults={
            name: json.dumps(value) for name, value in info.generation_defaults.items()
        },
    )


def fill_engine_facts(message: pb.GetServerInfoResponse, info: EngineInfo) -> None:
    """Adds what is known of an engine once it is ready."""
    message.device = info.device
    message.lane = info.lane
    message.depth = info.depth
    message.num_programs = info.num_programs
    message.max_rows = info.max_rows
    message.page_size = info.page_size
    message.num_pages = info.num_pages
    message.prefix_cache = info.prefix_cache
    message.deterministic = info.deterministic
    message.stage_seconds.update(info.stage_seconds)
    message.memory_plan = info.plan
