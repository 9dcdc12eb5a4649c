"""Python clients of the generation service; they give the records that `LLM` gives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import grpc
import grpc.aio
import numpy as np

from engine.request import SamplingParams
from engine.scheduling.scheduler import QueueFull
from engine.serving import messages, unreached
from engine.serving.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc

ADDRESS = "127.0.0.1:50051"
"""Where `treadle serve` listens when nothing else is said."""

Text = str | Sequence[int] | np.ndarray
"""Text or token ids."""
Params = SamplingParams | Mapping[str, Any] | None
"""`SamplingParams` are taken as they are; a mapping differs from the model's own defaults in the
fields it names; None stands for those defaults."""

_READY_POLL_SECONDS = 0.1
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
)


class Unavailable(ConnectionError):
    """The server cannot be reached, is starting, draining, or has lost its engine."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The log-likelihood of a continuation."""

    logprob: float
    """Sum over the continuation."""
    is_greedy: bool
    """True when every id was the likeliest at its place."""
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    """One per id of `token_ids`."""


class Client:
    """Calls a server and waits.

        with Client("127.0.0.1:50051") as client:
            print(client.generate("Once upon a time", {"max_tokens": 16}).outputs[0].text)

    Every call raises ValueError for a request the server refuses, QueueFull when too many wait,
    Unavailable when there is no engine to answer, TimeoutError after `timeout`, PermissionError for
    a token the server does not know, and grpc.RpcError for anything else.

    Args:
      address: host and port.
      timeout: seconds of one call at most; None: no limit.
      token: bearer token of a server with a token file.
      tls: of `grpc.ssl_channel_credentials`; None: plain text.
    """

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        timeout: float | None = None,
        token: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._timeout = timeout
        self._metadata = _metadata(token)
        self._server = _Server(address, is_tls=tls is not None)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, tls, options=_OPTIONS)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: Text,
        params: Params = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> RequestOutput:
        """The whole output of one prompt."""
        request = _generate_request(prompt, params, request_id, priority, cache_salt)
        request.stream_mode = pb.STREAM_MODE_FINAL
        (output,) = self._outputs(request, prompt)
        return output

    def stream(
        self,
        prompt: Text,
        params: Params = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> Generator[RequestOutput]:
        """What is new of one prompt's output, as it comes; closing it ends the request."""
        request = _generate_request(prompt, params, request_id, priority, cache_salt)
        return self._outputs(request, prompt)

    def score(
        self,
        pairs: Sequence[tuple[Text, Text]],
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> list[Score]:
        """Log-likelihoods of (prompt, continuation) pairs, in order."""
        request = _score_request(pairs, priority, cache_salt)
        return _scores(self._call(self._stub.Score, request))

    def abort(self, request_id: str) -> None:
        """Ends a request; one that is not live is no error."""
        self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call(self._stub.Detokenize, request).text

    def info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        return self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        """How it is served."""
        return self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest())

    def wait_ready(self, timeout: float) -> None:
        """Returns once the server answers requests.

        Raises:
          TimeoutError: it does not within `timeout` seconds; says what it is doing.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                server = self.server_info()
                if server.state == pb.SERVER_STATE_READY:
                    return
                doing = server.detail
            except Unavailable as error:
                doing = str(error)
            if time.monotonic() > end:
                raise _not_ready(timeout, doing)
            time.sleep(_READY_POLL_SECONDS)

    def close(self) -> None:
        """Closes the connection, which ends what still runs on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any) -> Any:
        with self._server.errors():
            return method(request, timeout=self._timeout, metadata=self._metadata)

    def _outputs(self, request: pb.GenerateRequest, prompt: Text) -> Generator[RequestOutput]:
        reader = _StreamReader(prompt)
        with self._server.errors():
            call: Any = self._stub.Generate(request, timeout=self._timeout, metadata=self._metadata)
            try:
                for message in call:
                    yield reader.output(message)
            finally:
                call.cancel()


class AsyncClient:
    """`Client` for an event loop: same methods and errors; `stream` is an async generator."""

    def __init__(
        self,
        address: str = ADDRESS,
        *,
        timeout: float | None = None,
        token: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._timeout = timeout
        self._metadata = _metadata(token)
        self._server = _Server(address, is_tls=tls is not None)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls, options=_OPTIONS)
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)

    async def generate(
        self,
        prompt: Text,
        params: Params = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> RequestOutput:
        """The whole output of one prompt."""
        request = _generate_request(prompt, params, request_id, priority, cache_salt)
        request.stream_mode = pb.STREAM_MODE_FINAL
        (output,) = [output async for output in self._outputs(request, prompt)]
        return output

    def stream(
        self,
        prompt: Text,
        params: Params = None,
        *,
        request_id: str = "",
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> AsyncGenerator[RequestOutput]:
        """What is new of one prompt's output, as it comes; closing it ends the request."""
        request = _generate_request(prompt, params, request_id, priority, cache_salt)
        return self._outputs(request, prompt)

    async def score(
        self,
        pairs: Sequence[tuple[Text, Text]],
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> list[Score]:
        """Log-likelihoods of (prompt, continuation) pairs, in order."""
        request = _score_request(pairs, priority, cache_salt)
        return _scores(await self._call(self._stub.Score, request))

    async def abort(self, request_id: str) -> None:
        """Ends a request; one that is not live is no error."""
        await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Text of ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request)).text

    async def info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        return await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        """How it is served."""
        return await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest())

    async def wait_ready(self, timeout: float) -> None:
        """Returns once the server answers requests; TimeoutError otherwise."""
        end = time.monotonic() + timeout
        while True:
            try:
                server = await self.server_info()
                if server.state == pb.SERVER_STATE_READY:
                    return
                doing = server.detail
            except Unavailable as error:
                doing = str(error)
            if time.monotonic() > end:
                raise _not_ready(timeout, doing)
            await asyncio.sleep(_READY_POLL_SECONDS)

    async def close(self) -> None:
        """Closes the connection, which ends what still runs on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any) -> Any:
        with self._server.errors():
            return await method(request, timeout=self._timeout, metadata=self._metadata)

    async def _outputs(
        self, request: pb.GenerateRequest, prompt: Text
    ) -> AsyncGenerator[RequestOutput]:
        reader = _StreamReader(prompt)
        with self._server.errors():
            call = self._stub.Generate(request, timeout=self._timeout, metadata=self._metadata)
            try:
                async for message in call:
                    yield reader.output(message)
            finally:
                call.cancel()


def _not_ready(timeout: float, doing: str) -> TimeoutError:
    return TimeoutError(f"the server is not ready after {timeout} s: {doing}")


class _Server:
    """Who is called and how: words the errors of calls.

    Args:
      address: host and port.
      is_tls: whether the channel speaks TLS.
    """

    def __init__(self, address: str, *, is_tls: bool) -> None:
        self._address = address
        self._is_tls = is_tls

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns the statuses of calls inside into exceptions of Python's own."""
        try:
            yield
        except grpc.RpcError as error:
            self._raise(error)

    def _raise(self, error: Any) -> NoReturn:
        detail = error.details() or ""
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(detail) from error
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise QueueFull(detail) from error
            case grpc.StatusCode.UNAVAILABLE:
                raise Unavailable(self._unavailable(detail)) from error
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(detail) from error
            case grpc.StatusCode.UNAUTHENTICATED:
                raise PermissionError(
                    "the server wants a token that it knows; give it as Client(token=...)"
                ) from error
        raise error

    def _unavailable(self, detail: str) -> str:
        if not unreached.is_unreached(detail):
            return detail
        ways = unreached.PYTHON
        return unreached.described(detail, self._address, is_tls=self._is_tls, ways=ways)


def _generate_request(
    prompt: Text, params: Params, request_id: str, priority: int, cache_salt: bytes
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id,
        params=messages.params_message(params),
        priority=priority,
        cache_salt=cache_salt,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(_token_ids(prompt))
    return request


def _score_request(
    pairs: Sequence[tuple[Text, Text]], priority: int, cache_salt: bytes
) -> pb.ScoreRequest:
    request = pb.ScoreRequest(priority=priority, cache_salt=cache_salt)
    for pair in pairs:
        item = request.items.add()
        for name, value in zip(("prompt", "continuation"), pair, strict=True):
            if isinstance(value, str):
                setattr(item, f"{name}_text", value)
            else:
                getattr(item, f"{name}_ids").CopyFrom(_token_ids(value))
    return request


def _token_ids(ids: Sequence[int] | np.ndarray) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=list(ids))
    except (ValueError, TypeError) as error:
        raise type(error)(f"a token id cannot be sent, it must be in [0, 2**32): {error}") from None


def _scores(response: pb.ScoreResponse) -> list[Score]:
    return [
        Score(one.logprob, one.is_greedy, tuple(one.token_ids), tuple(one.token_logprobs))
        for one in response.results
    ]


class _StreamReader:
    """Turns the messages of one stream into outputs, keeping what only the first one says."""

    def __init__(self, prompt: Text) -> None:
        self._prompt = prompt if isinstance(prompt, str) else None
        self._prompt_token_ids: list[int] = []
        self._seed = 0
        self._arrival_time = time.time()

    def output(self, message: pb.GenerateResponse) -> RequestOutput:
        """The output that one message carries."""
        if message.HasField("seed"):
            self._seed = message.seed
            self._prompt_token_ids = list(message.prompt.token_ids)
        is_finished = message.HasField("usage")
        usage = message.usage
        return RequestOutput(
            request_id=message.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[_completion(choice) for choice in message.choices],
            prompt_logprobs=_prompt_logprobs(message.prompt),
            finished=is_finished,
            num_cached_tokens=usage.cached_tokens,
            seed=self._seed,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                ttft=usage.time_to_first_token_seconds if is_finished else None,
                e2e=usage.total_seconds if is_finished else None,
            ),
        )


def _completion(choice: pb.Choice) -> CompletionOutput:
    has_logprobs = choice.HasField("cumulative_logprob")
    stop = choice.WhichOneof("stop_reason")
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        cumulative_logprob=choice.cumulative_logprob if has_logprobs else None,
        logprobs=[_position(one) for one in choice.logprobs] if has_logprobs else None,
        finish_reason=messages.FINISH_REASONS.get(choice.finish_reason),
        stop_reason=None if stop is None else getattr(choice, stop),
    )


def _prompt_logprobs(prompt: pb.Prompt) -> list[PositionLogprobs | None] | None:
    if not prompt.logprobs:
        return None
    return [_position(one) if one.rank else None for one in prompt.logprobs]


def _position(message: pb.TokenLogprob) -> PositionLogprobs:
    position = {message.token_id: Logprob(message.logprob, message.rank, message.token_bytes)}
    for rank, top in enumerate(message.top, start=1):
        position.setdefault(top.token_id, Logprob(top.logprob, rank, top.token_bytes))
    return position


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The header of a token; the line's end that a file brings along is no part of it."""
    if token is None:
        return ()
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token is one word of printable ASCII characters")
    return (("authorization", f"Bearer {token}"),)
