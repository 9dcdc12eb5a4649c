"""Sends requests to a gRPC server as a crowd would, and measures what each of them saw."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

import grpc
import grpc.aio
import numpy as np

from engine.config import Setting, SettingError
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc

Arrivals = Literal["poisson", "fixed", "closed"]
Protocol = Literal["treadle", "vllm"]

PERCENTILES = (50, 90, 95, 99)

_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
_STREAMS_PER_CHANNEL = 64
"""One connection orders its streams' bytes; several spread them."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A crowd: how many requests of which size, and when each of them starts."""

    num_requests: int
    prompt_len: int
    """Random token ids, so that no prefix is shared."""
    num_output_tokens: int
    """Exactly as many: end ids do not end the output."""
    arrivals: Arrivals
    """`poisson` and `fixed` start requests at `rate` whatever the server does (open loop);
    `closed` starts one when another ends, `concurrency` at a time."""
    rate: float = 0.0
    """Requests per second of the open loop."""
    concurrency: int = 0
    """Requests at a time of the closed loop."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_len", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise SettingError(
                    Setting(name), f" is {getattr(self, name)}, it must be at least 1"
                )
        if self.arrivals == "closed":
            if self.concurrency < 1:
                raise SettingError(
                    Setting("concurrency"),
                    f" is {self.concurrency}, the closed loop needs at least 1",
                )
        elif not 0.0 < self.rate < 1e6:
            raise SettingError(
                Setting("rate"),
                f" is {self.rate}, ",
                Setting("arrivals"),
                f" {self.arrivals} need requests per second in (0, 1000000)",
            )

    def starts(self) -> np.ndarray | None:
        """Seconds at which requests start, f64[num_requests]; None for the closed loop."""
        if self.arrivals == "closed":
            return None
        if self.arrivals == "fixed":
            return np.arange(self.num_requests) / self.rate
        gaps = np.random.default_rng(self.seed).exponential(1.0 / self.rate, self.num_requests)
        return np.concatenate(([0.0], np.cumsum(gaps[:-1])))

    def prompts(self, vocab_size: int) -> np.ndarray:
        """Token ids, i64[num_requests, prompt_len]."""
        rng = np.random.default_rng((self.seed, 1))
        return rng.integers(vocab_size, size=(self.num_requests, self.prompt_len))


@dataclasses.dataclass
class Seen:
    """What one request saw; times in seconds since the crowd's start."""

    due: float
    """When the plan wanted it sent: latencies count from here, so that a client that falls behind
    does not make the server look fast."""
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """Time and number of tokens of each message that had some."""
    end: float = 0.0
    code: str = "OK"
    detail: str = ""

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_seconds(self) -> float | None:
        """From its due time to its first token."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens after the first message; None without two messages."""
        if len(self.arrivals) < 2:
            return None
        later = self.num_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later

    def gaps(self) -> Iterator[float]:
        """Time between each two tokens; those that came in one message have none between them."""
        for (before, _), (after, count) in itertools.pairwise(self.arrivals):
            yield after - before
            yield from (0.0,) * (count - 1)


Call = Callable[[list[int], int], AsyncIterator[int]]
"""(prompt ids, output tokens) -> number of tokens of each message."""


class Connections:
    """Several connections to one server, and the calls over them.

    Args:
      address: host and port.
      num_streams: that run at a time at most.
      tls: of `grpc.ssl_channel_credentials`; None: plain text.
      token: bearer token; None: none.
    """

    def __init__(
        self,
        address: str,
        num_streams: int,
        *,
        tls: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        count = min(16, 1 + num_streams // _STREAMS_PER_CHANNEL)
        self._channels = [self._open() for _ in range(count)]
        self._turn = 0

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def model(self) -> pb.GetModelInfoResponse:
        """What is served there.

        Raises:
          grpc.RpcError: it does not answer.
        """
        stub: Any = pb_grpc.GenerationServiceStub(self._channels[0])
        return await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)

    def call(self, protocol: Protocol) -> Call:
        """Generates over one connection after another.

        Raises:
          RuntimeError: the messages of that protocol are not installed.
        """
        if protocol == "vllm":
            return self._vllm_call()
        stubs = [pb_grpc.GenerationServiceStub(channel) for channel in self._channels]

        async def generate(prompt_ids: list[int], num_tokens: int) -> AsyncIterator[int]:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt_ids),
                params=pb.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            )
            stub: Any = self._next(stubs)
            async for message in stub.Generate(request, metadata=self._metadata):
                yield sum(len(choice.token_ids) for choice in message.choices)

        return generate

    def _vllm_call(self) -> Call:
        try:
            from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
            from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc
        except ImportError as error:
            raise RuntimeError(
                "--protocol vllm needs the package smg-grpc-proto; install the extra `gateway`"
            ) from error
        stubs = [vllm_grpc.VllmEngineStub(channel) for channel in self._channels]

        async def generate(prompt_ids: list[int], num_tokens: int) -> AsyncIterator[int]:
            request = vllm_pb.GenerateRequest(
                tokenized=vllm_pb.TokenizedInput(input_ids=prompt_ids),
                sampling_params=vllm_pb.SamplingParams(
                    max_tokens=num_tokens, temperature=0.0, ignore_eos=True
                ),
                stream=True,
            )
            stub: Any = self._next(stubs)
            async for message in stub.Generate(request, metadata=self._metadata):
                yield len(message.chunk.token_ids)

        return generate

    def _next[T](self, stubs: Sequence[T]) -> T:
        self._turn += 1
        return stubs[self._turn % len(stubs)]

    def _open(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        return grpc.aio.secure_channel(self._address, self._tls, options=_OPTIONS)


async def drive(
    call: Call, plan: Plan, prompts: np.ndarray, progress: Callable[[int], None] = lambda _: None
) -> list[Seen]:
    """Runs a plan to its end; what fails is noted, not raised.

    Args:
      call: makes one request.
      plan: says when.
      prompts: token ids, i64[num_requests, prompt_len].
      progress: gets the number of requests that have ended.

    Returns:
      One record per request, in order of their starts.
    """
    clock = _Clock()
    seen: list[Seen] = []
    num_ended = 0

    async def run(index: int, due: float) -> None:
        nonlocal num_ended
        one = Seen(due)
        seen.append(one)
        try:
            async for count in call(prompts[index].tolist(), plan.num_output_tokens):
                if count:
                    one.arrivals.append((clock.now(), count))
        except grpc.aio.AioRpcError as error:
            one.code, one.detail = error.code().name, error.details() or ""
        one.end = clock.now()
        num_ended += 1
        progress(num_ended)

    starts = plan.starts()
    if starts is None:
        await _closed(run, plan, clock)
        return seen
    async with asyncio.TaskGroup() as tasks:
        for index, due in enumerate(starts.tolist()):
            await asyncio.sleep(due - clock.now())
            tasks.create_task(run(index, due))
    return seen


async def _closed(run: Callable[[int, float], Any], plan: Plan, clock: _Clock) -> None:
    waiting = iter(range(plan.num_requests))

    async def worker() -> None:
        for index in waiting:
            await run(index, clock.now())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(plan.concurrency, plan.num_requests)):
            tasks.create_task(worker())


class _Clock:
    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began


@dataclasses.dataclass(frozen=True)
class Figures:
    """A crowd in numbers; of latencies, milliseconds by percentile, mean and max."""

    num_requests: int
    codes: dict[str, int]
    """Requests by how they ended."""
    first_fault: str
    """Words of the first one that failed."""
    seconds: float
    """First due time to the last end."""
    request_rate: float
    """Requests that ended well, per second."""
    output_token_rate: float
    """Tokens per second, over all requests."""
    ttft_ms: dict[str, float]
    """Due time to first token."""
    tpot_ms: dict[str, float]
    """Mean time per later token of each request."""
    itl_ms: dict[str, float]
    """Time between two tokens; 0 where they came together."""
    e2e_ms: dict[str, float]
    """Due time to the end, of requests that ended well."""
    tokens_per_message: float


def figures(seen: Sequence[Seen]) -> Figures:
    """Sums a crowd up."""
    good = [one for one in seen if one.code == "OK"]
    seconds = max((one.end for one in seen), default=0.0) - min(
        (one.due for one in seen), default=0.0
    )
    firsts = [one.first_token_seconds for one in good]
    means = [one.seconds_per_token for one in good]
    num_tokens = sum(one.num_tokens for one in seen)
    num_messages = sum(len(one.arrivals) for one in seen)
    return Figures(
        num_requests=len(seen),
        codes=dict(collections.Counter(one.code for one in seen)),
        first_fault=next((one.detail for one in seen if one.code != "OK"), ""),
        seconds=seconds,
        request_rate=len(good) / max(seconds, 1e-9),
        output_token_rate=num_tokens / max(seconds, 1e-9),
        ttft_ms=_summary([one for one in firsts if one is not None]),
        tpot_ms=_summary([one for one in means if one is not None]),
        itl_ms=_summary([gap for one in good for gap in one.gaps()]),
        e2e_ms=_summary([one.end - one.due for one in good]),
        tokens_per_message=num_tokens / max(num_messages, 1),
    )


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = 1e3 * np.asarray(seconds)
    percentiles = np.percentile(values, PERCENTILES)
    found = {f"p{share}": float(one) for share, one in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
