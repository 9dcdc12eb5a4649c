"""What stands around every call of every service: name, token, deadline, standard status."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import inspect
import logging
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import prometheus_client

from engine.config import LIMITS
from engine.serving import logs

if TYPE_CHECKING:
    from engine.serving.tracing import Spans

_LOG = logging.getLogger(__name__)
_CALL_LOG = logging.getLogger("treadle.calls")

_HEALTH = "/grpc.health.v1.Health/"
_BOUNDED = ("Generate", "Score", "Embed")
"""Methods that make tokens: the server's own limit of time holds for them."""
_MIN_TOKEN_CHARS = 16
_REFUSED_ID_CHARS = 32
"""Characters that are logged of a request id over the limit."""
_CLOCK_SECONDS = 0.05
"""A caller gives up at its deadline by its own clock, a moment before ours."""
_CANCELLED, _DEADLINE, _INTERNAL = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
)

Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
Answer = Callable[[], Awaitable[Any]]
Around = Callable[[Answer, Any, grpc.aio.ServicerContext], Awaitable[Any]]
"""(answers the call, its request, its context) -> the response, None when it was streamed."""


class Calls(grpc.aio.ServerInterceptor):
    """Names each call, ends it at its deadline, turns any exception into INTERNAL, logs its end.

    Stands outermost, so that what the others refuse is named and counted too.

    Args:
      registry: gets `treadle:calls`, by method and status code, and `treadle:calls_in_flight`.
      request_seconds: how long a call that makes tokens may take, whatever its own deadline; None:
        as long as it likes.
      spans: begin and end with the calls; None: there are none.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        request_seconds: float | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._spans = spans
        self._ended = prometheus_client.Counter(
            "treadle:calls", "Calls ended, by their status.", ("method", "code"), registry=registry
        )
        self._in_flight = prometheus_client.Gauge(
            "treadle:calls_in_flight", "Calls that have not ended.", registry=registry
        )
        self._request_seconds = request_seconds

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The call's handler with all of it around."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        metadata = handler_call_details.invocation_metadata
        # Who adds to a tracestate may send a second one; of anything else the last one counts.
        states = ",".join(str(value) for key, value in metadata or () if key == "tracestate")
        call = logs.call_of(handler_call_details.method, _texts(metadata) | {"tracestate": states})
        return _wrapped(handler, functools.partial(self._around, call))

    async def _around(
        self, call: logs.Call, answer: Answer, request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        logs.enter(call)
        context.set_trailing_metadata((("x-request-id", call.call_id),))
        began = time.monotonic()
        self._in_flight.inc()
        span = None if self._spans is None else self._spans.begin(call)
        code = _INTERNAL
        try:
            code, response = await self._answered(call, answer, context)
            return response
        except grpc.aio.AbortError:
            code = _status(context.code())
            raise
        except (asyncio.CancelledError, grpc.aio.BaseError):  # the caller is gone, or its time is
            code = _CANCELLED if _remaining(context) > _CLOCK_SECONDS else _DEADLINE
            raise
        finally:
            self._in_flight.dec()
            self._ended.labels(call.method, code.name).inc()
            facts: dict[str, object] = {"code": code.name}
            facts["seconds"] = round(time.monotonic() - began, 6)
            if request_id := _shortened(getattr(request, "request_id", "")):
                facts["request_id"] = request_id
            if self._spans is not None:
                self._spans.end(span, code.name, request_id)
            level = logging.DEBUG if call.method.startswith(_HEALTH) else logging.INFO
            _CALL_LOG.log(level, "call ended", extra={"facts": facts})

    async def _answered(
        self, call: logs.Call, answer: Answer, context: grpc.aio.ServicerContext
    ) -> tuple[grpc.StatusCode, Any]:
        allowed = self._request_seconds if call.method.endswith(_BOUNDED) else None
        seconds = min(_remaining(context), float("inf") if allowed is None else allowed)
        if seconds <= 0:
            await context.abort(_DEADLINE, "the deadline had passed when the call arrived")
        bound = asyncio.timeout(None if seconds == float("inf") else seconds)
        try:
            async with bound:
                response = await answer()
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and bound.expired():
                await context.abort(_DEADLINE, _late(seconds, allowed))
            _LOG.exception("a call failed")
            await context.abort(
                _INTERNAL, f"the server failed on call {call.call_id}; its log names the cause"
            )
        return _status(context.code()), response


class Tokens(grpc.aio.ServerInterceptor):
    """Refuses calls without one of the bearer tokens; health is open to probes, nothing else is.

    Args:
      tokens: all that are good.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        # Digests have one length, so that a comparison does not tell that of a token.
        self._digests = [_digest(token) for token in tokens]

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The call's handler, or one that refuses it unread."""
        handler = await continuation(handler_call_details)
        metadata = _texts(handler_call_details.invocation_metadata)
        is_open = handler_call_details.method.startswith(_HEALTH)
        if handler is None or is_open or self._holds(metadata.get("authorization", "")):
            return handler
        return _wrapped(handler._replace(request_deserializer=None), _unauthenticated)

    def _holds(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip())
        # A list, not a generator: every token is compared, whichever is the right one.
        return scheme.lower() == "bearer" and any(
            [hmac.compare_digest(given, digest) for digest in self._digests]
        )


def read_tokens(path: pathlib.Path) -> tuple[str, ...]:
    """Bearer tokens of a file, one a line; empty lines and those that start with # are skipped.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has no token, or one that is too short or not plain.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError(f"token file {path} holds no token; write one a line")
    for number, token in enumerate(tokens, start=1):
        check_token(f"token {number} of {path}", token)
    return tokens


def check_token(name: str, token: str) -> None:
    """Refuses a secret that is too short or not plain, without saying it.

    Raises:
      ValueError: says so of `name`.
    """
    if len(token) < _MIN_TOKEN_CHARS:
        raise ValueError(
            f"{name} has {len(token)} characters, it must have at least {_MIN_TOKEN_CHARS}; make "
            "one with `openssl rand -hex 32`"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{name} holds a space or a character that is not ASCII; make one with "
            "`openssl rand -hex 32`"
        )


async def _unauthenticated(answer: Answer, request: Any, context: grpc.aio.ServicerContext) -> Any:
    del answer, request
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the call has no valid token; send the metadata `authorization: Bearer TOKEN`",
    )


def _wrapped(handler: Any, around: Around) -> Any:
    """The handler with `around` in place of its behaviour, which `around` may call."""
    kind = (
        f"{'stream' if handler.request_streaming else 'unary'}_"
        f"{'stream' if handler.response_streaming else 'unary'}"
    )
    behave = getattr(handler, kind)

    async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await around(functools.partial(_answer, behave, request, context), request, context)

    return handler._replace(**{kind: run})


async def _answer(
    behave: Callable[..., Any], request: Any, context: grpc.aio.ServicerContext
) -> Any:
    if inspect.isasyncgenfunction(behave):
        async with contextlib.aclosing(behave(request, context)) as responses:
            async for response in responses:
                await context.write(response)
        return None
    return await behave(request, context)


def _remaining(context: grpc.aio.ServicerContext) -> float:
    """Seconds up to the caller's deadline, infinite without one."""
    remaining = context.time_remaining()
    return float("inf") if remaining is None else remaining


def _late(seconds: float, allowed: float | None) -> str:
    if seconds == allowed:
        return (
            f"the request ran for {seconds:g} s, the server's limit; ask for fewer tokens or start "
            "the server with a larger --request-seconds"
        )
    return f"the deadline of {seconds:.3f} s passed; what was queued or running is ended"


def _status(code: Any) -> grpc.StatusCode:
    """The code that a context holds: nothing, a number or a code."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((one for one in grpc.StatusCode if one.value[0] == code), grpc.StatusCode.OK)


def _shortened(request_id: str) -> str:
    """An id as it is logged: of one that is refused for its length the start alone."""
    if len(request_id) <= LIMITS.request_id_chars:
        return request_id
    return f"{request_id[:_REFUSED_ID_CHARS]}... ({len(request_id)} characters)"


def _texts(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
