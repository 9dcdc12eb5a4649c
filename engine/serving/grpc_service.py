"""The calls of the generation service, over an engine that may not be there yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NoReturn

import google.protobuf.message
import grpc
import grpc.aio

from engine.request import FinishReason
from engine.scheduling.scheduler import QueueFull
from engine.serving import messages, metrics, versions
from engine.serving.outputs import RequestFailed, RequestOutput, RequestRefused, ScoreOutput
from engine.serving.thread import EngineDead
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from engine.serving.llm import AsyncLLM

_LOG = logging.getLogger(__name__)

# A status travels in the trailers, whose default limit is 8 KiB.
_DETAIL_CHARS = 1000
_FAULT = "the engine failed on this request; the server's log names the cause"


class GenerationService(pb_grpc.GenerationServiceServicer):
    """The calls of generation.proto, over an engine that may not be there yet.

    Lives on one event loop. Every fault leaves with a standard status code, never UNKNOWN, which
    gateways take for a reason to try again.

    Args:
      settings: what GetServerInfo tells about the engine's settings.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = dict(settings)
        self._state = pb.SERVER_STATE_STARTING
        self._detail = "starting"
        self._llm: AsyncLLM | None = None
        self._metrics: metrics.Metrics | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_cut = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_calls(self) -> int:
        """Calls that hold the engine now."""
        return len(self._calls)

    def report(self, stage: str, fraction: float, detail: str) -> None:
        """Notes how far start-up is."""
        self._detail = f"{stage} {fraction:.0%} {detail}".rstrip()

    def become_ready(self, llm: AsyncLLM, engine_metrics: metrics.Metrics) -> None:
        """Takes requests from now on."""
        self._llm, self._metrics = llm, engine_metrics
        self._state, self._detail = pb.SERVER_STATE_READY, ""

    def become_draining(self) -> None:
        """Takes no more requests; running ones go on."""
        self._state, self._detail = pb.SERVER_STATE_DRAINING, "shutting down"

    def become_failed(self, reason: str) -> None:
        """Takes no more requests, because the engine was lost."""
        self._state, self._detail = pb.SERVER_STATE_FAILED, reason

    def cut(self) -> None:
        """Ends the calls that still hold the engine, with UNAVAILABLE."""
        self._is_cut = True
        for call in self._calls:
            call.cancel()

    async def wait_idle(self) -> None:
        """Returns once no call holds the engine."""
        await self._idle.wait()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams what the request produces; leaving early, for any reason, frees it."""
        async with self.call(context) as llm:
            fields = messages.params_fields(request.params)
            stream = llm.generate(
                messages.prompt(request),
                fields,
                request_id=request.request_id or None,
                priority=request.priority,
                cache_salt=request.cache_salt,
                mode="final" if request.stream_mode == pb.STREAM_MODE_FINAL else "delta",
            )
            is_first = True
            with self.counted() as count:
                async with contextlib.aclosing(stream):
                    async for output in stream:
                        count(output)
                        message = messages.generate_response(output, fields, is_first=is_first)
                        if output.finished:
                            message.usage.CopyFrom(messages.usage(output, count.num_output_tokens))
                        # Not `yield`: a cancelled call must raise here, not when the generator is
                        # collected.
                        await context.write(message)
                        is_first = False

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScoreResponse:
        """Scores all items side by side; one that is at fault refuses the call."""
        async with self.call(context) as llm:
            pairs = [messages.score_pair(item) for item in request.items]
            llm.frontend.check_count(len(pairs))
            results = await _scored(llm, pairs, request.priority, request.cache_salt)
            return pb.ScoreResponse(results=[messages.score_result(one) for one in results])

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends a request; one that is not live is no error."""
        await self.abort((request.request_id,))
        return pb.AbortResponse()

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Text to ids."""
        async with self.call(context) as llm:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            encode = llm.frontend.tokenizer("Tokenize").encode
            ids = await asyncio.to_thread(encode, request.text, add_special_tokens=special)
            return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Ids to text."""
        async with self.call(context) as llm:
            skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
            tokenizer = llm.frontend.tokenizer("Detokenize")
            ids = list(request.token_ids)
            if ids and max(ids) >= tokenizer.vocab_size:
                raise ValueError(
                    f"token_ids holds {max(ids)}, outside the vocabulary of "
                    f"{tokenizer.vocab_size} ids"
                )
            text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """What is served."""
        async with self.call(context) as llm:
            return messages.model_info(llm.info, llm.frontend.eos_ids)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """How it is served, as far as it is known yet."""
        answer = pb.GetServerInfoResponse(
            state=self._state,
            detail=self._detail,
            version=versions.own_version(),
            versions=versions.versions(),
            settings=self._settings,
        )
        if self._llm is not None:
            messages.fill_engine_facts(answer, self._llm.info)
            with contextlib.suppress(EngineDead):
                stats = await self._llm.stats()
                answer.num_running = stats.num_running
                answer.num_waiting = stats.num_waiting
        return answer

    @contextlib.asynccontextmanager
    async def call(
        self, context: grpc.aio.ServicerContext, *, is_awaited: bool = True
    ) -> AsyncIterator[AsyncLLM]:
        """Lends the engine to one call, and words what goes wrong in it as a status.

        Args:
          context: of the call.
          is_awaited: whether a server that drains waits for the call's end.
        """
        llm = self._llm
        if llm is None or self._state != pb.SERVER_STATE_READY:
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, self._unavailable())
        task = asyncio.current_task()
        assert task is not None
        if is_awaited:
            self._calls.add(task)
            self._idle.clear()
        try:
            yield llm
            return
        except asyncio.CancelledError:
            if not (self._is_cut and is_awaited):  # the client is gone
                raise
            task.uncancel()
            code, detail = grpc.StatusCode.UNAVAILABLE, "the server ends; try another replica"
        except (ValueError, TypeError, RequestRefused) as error:
            code, detail = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except QueueFull as error:
            code, detail = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        except EngineDead:
            _LOG.exception("a call met a dead engine")
            code, detail = grpc.StatusCode.UNAVAILABLE, "the engine was lost; the server ends"
        except RequestFailed as error:
            _LOG.error("a request failed: %s", error)
            code, detail = grpc.StatusCode.INTERNAL, str(error)
        except grpc.aio.BaseError:
            raise
        except Exception:
            _LOG.exception("a call failed")
            code, detail = grpc.StatusCode.INTERNAL, _FAULT
        finally:
            self._calls.discard(task)
            if not self._calls:
                self._idle.set()
        await self._refuse(context, code, detail)

    async def _refuse(
        self, context: grpc.aio.ServicerContext, code: grpc.StatusCode, detail: str
    ) -> NoReturn:
        if self._metrics is not None:
            self._metrics.refuse(code.name)
        if len(detail) > _DETAIL_CHARS:
            detail = detail[:_DETAIL_CHARS] + "…"
        await context.abort(code, detail)
        raise AssertionError("abort raises")

    def _unavailable(self) -> str:
        words = {
            pb.SERVER_STATE_STARTING: "the server is starting",
            pb.SERVER_STATE_DRAINING: "the server is draining and takes no new requests",
        }
        start = words.get(self._state, "the engine was lost; the server ends")
        return f"{start} ({self._detail}); try another replica, or later"

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; one that is not live is no error."""
        if self._llm is not None:
            for request_id in request_ids:
                await self._llm.abort(request_id)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Count]:
        count = Count(self._metrics)
        try:
            yield count
        except RequestFailed:
            count.unfinished = "error"
            raise
        finally:
            if self._metrics is not None and count.last is not None:
                self._metrics.finish(count.finished_request())


class Count:
    """Adds up what one stream produced.

    Args:
      engine_metrics: told of tokens as they come.
    """

    def __init__(self, engine_metrics: metrics.Metrics | None) -> None:
        self._metrics = engine_metrics
        self.last: RequestOutput | None = None
        self.unfinished: FinishReason = "abort"
        """Why choices ended that did not say so themselves."""
        self.num_output_tokens = 0
        self._began = asyncio.get_running_loop().time()
        self._reasons: dict[int, FinishReason] = {}

    def __call__(self, output: RequestOutput) -> None:
        """Takes the next output."""
        self.last = output
        num_new = output.num_output_tokens
        self.num_output_tokens += num_new
        if self._metrics is not None:
            self._metrics.produce(num_new)
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self._reasons[choice.index] = choice.finish_reason

    def finished_request(self) -> metrics.FinishedRequest:
        """Figures of the request, whose caller may have left it unfinished."""
        assert self.last is not None
        elapsed = asyncio.get_running_loop().time() - self._began
        reasons, times = tuple(self._reasons.values()), self.last.metrics
        return metrics.FinishedRequest(
            num_prompt_tokens=len(self.last.prompt_token_ids),
            num_output_tokens=self.num_output_tokens,
            finish_reasons=reasons if self.last.finished else (*reasons, self.unfinished),
            queue_seconds=times.queue,
            first_token_seconds=times.ttft,
            last_token_seconds=times.last_token,
            total_seconds=times.e2e or elapsed,
        )


async def _scored(
    llm: AsyncLLM,
    pairs: Sequence[tuple[str | list[int], str | list[int]]],
    priority: int,
    cache_salt: bytes,
) -> list[ScoreOutput]:
    """Scores side by side; leaving early, for any reason, frees all."""

    async def score(index: int) -> ScoreOutput:
        try:
            return await llm.score(*pairs[index], priority=priority, cache_salt=cache_salt)
        except (ValueError, TypeError) as error:
            raise type(error)(f"items[{index}]: {error}") from error

    tasks = [asyncio.ensure_future(score(index)) for index in range(len(pairs))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class UnreadableRequests(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message with INVALID_ARGUMENT; grpc itself would say UNKNOWN."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The call's handler, made to see bytes that it could not be given."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        handler = handler._replace(request_deserializer=_tolerant(handler.request_deserializer))
        if handler.request_streaming:
            return handler._replace(stream_stream=_refusing_stream(handler.stream_stream))
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(**{kind: _refusing(getattr(handler, kind))})


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except google.protobuf.message.DecodeError as error:
            return error

    return read


def _refusing(behave: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await behave(await _readable(request, context), context)

    return run


def _refusing_stream(behave: Callable[..., AsyncGenerator[Any]]) -> Callable[..., Any]:
    """For reflection, the only service whose calls are streams of requests."""

    async def run(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        readable = (await _readable(one, context) async for one in requests)
        async with contextlib.aclosing(behave(readable, context)) as responses:
            async for response in responses:
                yield response

    return run


async def _readable(request: Any, context: grpc.aio.ServicerContext) -> Any:
    if isinstance(request, google.protobuf.message.DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request)[:_DETAIL_CHARS])
    return request
