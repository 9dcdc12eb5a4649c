"""Speaks `vllm.grpc.engine.VllmEngine`, so that the ecosystem's gateway serves this engine too.

The one place where messages of `smg-grpc-proto` (extra `gateway`) appear.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from engine.request import StructuredOutput
from engine.scheduling.cache_events import (
    CacheCleared,
    CacheContent,
    CacheEvent,
    CacheWatch,
    PageRemoved,
    PageStored,
)
from engine.serving import outputs, versions
from engine.text import bundle

if TYPE_CHECKING:
    from engine.core import CoreStats
    from engine.serving.frontend import Frontend, Prompt
    from engine.serving.grpc_service import GenerationService
    from engine.serving.llm import AsyncLLM

# gRPC clients take messages of 4 MiB unless told otherwise.
_TOKENIZER_CHUNK_BYTES = 2**19
_PAGES_PER_BATCH = 512
_SECONDS_PER_RATE = 1.0

_FOREIGN_FIELDS = {
    "kv_transfer_params": "prefill and decode run in one engine here",
    "kv_transfer_params_json": "prefill and decode run in one engine here",
    "mm_inputs": "the model reads text alone",
    "extra_mm_inputs": "the model reads text alone",
    "media_refs": "the model reads text alone",
}


def add_to_server(service: GenerationService, server: grpc.aio.Server) -> None:
    """Adds the compatibility service to a server that is not started yet.

    Args:
      service: lends the engine, counts calls and words faults.
      server: of the same event loop.
    """
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(service), server)


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The calls of vllm_engine.proto, over the engine that the generation service lends.

    What a caller leaves out is neutral, not the checkpoint's default: gateways read those in
    GetModelInfo and send them.

    Args:
      service: lends the engine, counts calls and words faults.
    """

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._began = time.monotonic()
        self._last_request = 0.0
        self._unstarted: dict[object, int] = {}
        """Prompt tokens of calls that the engine has not answered yet."""
        self._rate = _Rate()

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams chunks and one `complete` for each choice; leaving early frees the request."""
        async with self._service.call(context) as llm:
            self._last_request = time.time()
            params = request.sampling_params
            stream = llm.generate(
                await _prompt(request, llm),
                params_fields(params),
                request_id=request.request_id or None,
                mode="delta" if request.stream else "final",
            )
            answer, call = _Answer(params, is_stream=request.stream), object()
            self._unstarted[call] = len(request.tokenized.input_ids)
            try:
                with self._service.counted() as count:
                    async with contextlib.aclosing(stream):
                        async for output in stream:
                            self._unstarted.pop(call, None)
                            count(output)
                            self._rate.add(output.num_output_tokens)
                            for message in answer.messages(output):
                                await context.write(message)
            finally:
                self._unstarted.pop(call, None)

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends requests; those that are not live are no error."""
        await self._service.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Answers when requests are taken, else UNAVAILABLE with the reason.

        A starting server that answered "not healthy" would be registered by the gateway as one of
        an unknown model, for good (smg 1.13.0).
        """
        async with self._service.call(context, is_awaited=False) as llm:
            llm.check_health()
            return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """What is served, and the checkpoint's own sampling defaults."""
        async with self._service.call(context) as llm:
            info, path = llm.info, llm.config.path
            described = await asyncio.to_thread(bundle.model_config, path)
            folder = bundle.tokenizer_folder(path)
            return vllm_engine_pb2.GetModelInfoResponse(
                model_path=str(path.absolute()),
                is_generation=True,
                max_context_length=info.max_model_len,
                vocab_size=info.vocab_size,
                served_model_name=info.model_name,
                # A path is never taken for the name of somebody's repository.
                tokenizer_path=str((folder or path).absolute()),
                model_type=str(described.get("model_type") or ""),
                architectures=[info.architecture],
                eos_token_ids=llm.frontend.eos_ids,
                pad_token_id=_id_in(described, "pad_token_id"),
                bos_token_id=_id_in(described, "bos_token_id"),
                max_req_input_len=info.max_model_len,
                default_sampling_params_json=_defaults(llm.frontend),
            )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """How it is served."""
        async with self._service.call(context) as llm:
            info, stats = llm.info, await llm.stats()
            return vllm_engine_pb2.GetServerInfoResponse(
                active_requests=stats.num_running + stats.num_waiting,
                last_receive_timestamp=self._last_request,
                uptime_seconds=time.monotonic() - self._began,
                server_type="treadle",
                data_parallel_size=1,
                kv_cache_dtype=info.dtype,
                block_size=info.page_size,
                model_dtype=info.dtype,
                max_num_seqs=info.max_rows,
                constrained_decoding_start="first_token",
            )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """The engine's counters now; there is one data-parallel rank, 0."""
        async with self._service.call(context) as llm:
            load = _load(await llm.stats(), llm.info.max_rows)
            load.max_total_num_tokens = (llm.info.num_pages - 1) * llm.info.page_size
            load.num_used_tokens = round(load.token_usage * load.max_total_num_tokens)
            load.num_waiting_uncached_tokens = sum(self._unstarted.values())
            load.gen_throughput = self._rate.per_second()
            return vllm_engine_pb2.GetLoadsResponse(
                timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
                version=versions.own_version(),
                dp_rank_count=1,
                loads=[load],
            )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams a zip of the tokenizer's files, config.json among them."""
        async with self._service.call(context) as llm:
            if llm.tokenizer is None:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "the model has no tokenizer; send token ids, or add its tokenizer.json",
                )
            data = await asyncio.to_thread(
                bundle.tokenizer_bundle, llm.config.path, llm.frontend.tokenizer("GetTokenizer")
            )
            fingerprint = hashlib.sha256(data).hexdigest()
            for start in range(0, len(data), _TOKENIZER_CHUNK_BYTES):
                piece = data[start : start + _TOKENIZER_CHUNK_BYTES]
                is_last = start + len(piece) == len(data)
                await context.write(
                    common_pb2.GetTokenizerChunk(data=piece, sha256=fingerprint if is_last else "")
                )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Forgets every cached prefix; running requests keep their pages, so it never waits."""
        async with self._service.call(context) as llm:
            await llm.reset_prefix_cache()
            return common_pb2.FlushCacheResponse(
                success=True, message="every cached prefix is forgotten"
            )

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams what the prefix cache holds, then every change of it.

        A subscriber that falls behind gets the whole content again. Batches are numbered within a
        subscription: the content comes as a snapshot, which subscribers take at any number.
        """
        async with self._service.call(context, is_awaited=False) as llm:
            loop, news = asyncio.get_running_loop(), asyncio.Event()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                    loop.call_soon_threadsafe(news.set)

            watch, batches = CacheWatch(wake), _Batches(request.start_sequence_number)
            try:
                events = None
                while True:
                    if events is None:
                        content = await llm.watch_prefix_cache(watch)
                        messages = batches.snapshot(content)
                    else:
                        messages = batches.changes(events)
                    for message in messages:
                        await context.write(message)
                    await news.wait()
                    news.clear()
                    events = watch.take()
            finally:
                llm.unwatch_prefix_cache(watch)

    async def Embed(
        self, request: vllm_engine_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.EmbedResponse:
        """Declined."""
        return await _decline(context, "this engine generates text; it has no embedding models")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Declined."""
        return await _decline(context, "profiles are taken on the engine's own machine")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Declined."""
        return await _decline(context, "profiles are taken on the engine's own machine")


async def _decline(context: grpc.aio.ServicerContext, reason: str) -> Any:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)


# Requests.


def params_fields(message: vllm_engine_pb2.SamplingParams) -> dict[str, Any]:
    """Fields of `SamplingParams`, all named but `max_tokens`, whose default the model may have.

    A number that is 0 where 0 means nothing was never set: proto3 does not tell them apart.

    Raises:
      ValueError: a constraint that is malformed or not known.
    """
    fields: dict[str, Any] = {
        "n": message.n or 1,
        "temperature": message.temperature if message.HasField("temperature") else 1.0,
        "top_p": message.top_p or 1.0,
        "top_k": message.top_k,
        "min_p": message.min_p,
        "frequency_penalty": message.frequency_penalty,
        "presence_penalty": message.presence_penalty,
        "repetition_penalty": message.repetition_penalty or 1.0,
        "logit_bias": dict(message.logit_bias) or None,
        "min_tokens": message.min_tokens,
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "include_stop_str_in_output": message.include_stop_str_in_output,
        "skip_special_tokens": message.skip_special_tokens,
        "structured": _structured(message),
    }
    for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    return fields


def _structured(message: vllm_engine_pb2.SamplingParams) -> StructuredOutput | None:
    """The form that the output must have; None: any."""
    kind = message.WhichOneof("constraint")
    match kind:
        case "json_schema" | "regex" | "grammar":
            return StructuredOutput(kind, getattr(message, kind))
        case "json_object":
            return StructuredOutput("json_object") if message.json_object else None
        case "choice":
            return StructuredOutput("choice", choices=tuple(message.choice.choices))
        case "structural_tag":
            raise ValueError(
                "structural_tag is set but this engine does not know it; give a json_schema, a "
                "regex or a grammar"
            )
    return None


async def _prompt(request: vllm_engine_pb2.GenerateRequest, llm: AsyncLLM) -> Prompt:
    """The ids or text to run, cut where the caller asked for it."""
    _check_foreign_fields(request)
    params = request.sampling_params
    match request.WhichOneof("input"):
        case "tokenized":
            prompt: str | list[int] = list(request.tokenized.input_ids)
        case "text":
            prompt = request.text
        case _:
            raise ValueError("input is missing; set tokenized or text")
    if not params.HasField("truncate_prompt_tokens"):
        return prompt
    if isinstance(prompt, str):
        encode = llm.frontend.tokenizer("a text prompt").encode
        prompt = await asyncio.to_thread(encode, prompt)
    return prompt[-_num_kept(params, llm.info.max_model_len) :]


def _num_kept(params: vllm_engine_pb2.SamplingParams, max_model_len: int) -> int:
    """Tokens of the prompt's end that run."""
    wanted = params.truncate_prompt_tokens
    if wanted == -1:
        return max(1, max_model_len - max(1, params.max_tokens))
    if wanted < 1:
        raise ValueError(
            f"truncate_prompt_tokens is {wanted}, it must be at least 1, or -1 for what fits"
        )
    return wanted


def _check_foreign_fields(request: vllm_engine_pb2.GenerateRequest) -> None:
    present = {field.name for field, _ in request.ListFields()}
    for name, reason in _FOREIGN_FIELDS.items():
        if name in present:
            raise ValueError(f"{name} is set but {reason}; leave it out")
    if request.data_parallel_rank:
        raise ValueError(
            f"data_parallel_rank is {request.data_parallel_rank} but the engine is one rank, 0"
        )


# Answers.


class _Answer:
    """Makes the messages of one call out of its outputs.

    A stream's `complete` repeats all ids of its choice but not their log-probabilities.
    """

    def __init__(self, params: vllm_engine_pb2.SamplingParams, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._num_top = params.logprobs
        self._num_prompt_top = params.prompt_logprobs
        self._token_ids: dict[int, list[int]] = {}
        self._prompt_logprobs: vllm_engine_pb2.InputLogProbs | None = None

    def messages(self, output: outputs.RequestOutput) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """What one output says."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = _input_logprobs(output, self._num_prompt_top)
        for choice in output.outputs:
            if self._is_stream and choice.token_ids:
                yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(output, choice))
            if choice.finish_reason is not None:
                yield vllm_engine_pb2.GenerateResponse(complete=self._complete(output, choice))

    def _chunk(
        self, output: outputs.RequestOutput, choice: outputs.CompletionOutput
    ) -> vllm_engine_pb2.GenerateStreamChunk:
        self._token_ids.setdefault(choice.index, []).extend(choice.token_ids)
        # Counts of a chunk are of what is new: the gateway adds them up.
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=choice.token_ids,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(choice.token_ids),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=_output_logprobs(choice, self._num_top),
            input_logprobs=self._first_prompt_logprobs(),
            index=choice.index,
        )

    def _complete(
        self, output: outputs.RequestOutput, choice: outputs.CompletionOutput
    ) -> vllm_engine_pb2.GenerateComplete:
        if self._is_stream:
            token_ids, logprobs = self._token_ids.pop(choice.index, []), None
            prompt_logprobs = self._first_prompt_logprobs()
        else:
            token_ids, logprobs = choice.token_ids, _output_logprobs(choice, self._num_top)
            prompt_logprobs = self._prompt_logprobs
        message = vllm_engine_pb2.GenerateComplete(
            output_ids=token_ids,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(token_ids),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=logprobs,
            input_logprobs=prompt_logprobs,
            index=choice.index,
        )
        if isinstance(choice.stop_reason, str):
            message.matched_stop_str = choice.stop_reason
        elif choice.stop_reason is not None:
            message.matched_token_id = choice.stop_reason
        return message

    def _first_prompt_logprobs(self) -> vllm_engine_pb2.InputLogProbs | None:
        """Those of the prompt, for the first message behind them alone."""
        found, self._prompt_logprobs = self._prompt_logprobs, None
        return found


def _output_logprobs(
    choice: outputs.CompletionOutput, num_top: int
) -> vllm_engine_pb2.OutputLogProbs | None:
    if choice.logprobs is None:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_ids=choice.token_ids,
        token_logprobs=[
            position[token_id].logprob
            for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True)
        ],
        top_logprobs=[_top(position, num_top) for position in choice.logprobs] if num_top else (),
    )


def _input_logprobs(output: outputs.RequestOutput, num_top: int) -> vllm_engine_pb2.InputLogProbs:
    assert output.prompt_logprobs is not None, "the caller has looked"
    message = vllm_engine_pb2.InputLogProbs(token_ids=output.prompt_token_ids)
    for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
        entry = message.token_logprobs.add()
        if position is not None:
            entry.value = position[token_id].logprob
        if num_top:
            message.top_logprobs.append(_top(position or {}, num_top))
    return message


def _top(position: Mapping[int, outputs.Logprob], num_top: int) -> vllm_engine_pb2.TopLogProbs:
    likeliest = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
    return vllm_engine_pb2.TopLogProbs(
        token_ids=[token_id for token_id, _ in likeliest],
        values=[scored.logprob for _, scored in likeliest],
    )


# Facts.


def _defaults(frontend: Frontend) -> str:
    """The checkpoint's sampling defaults as JSON; empty where they are the neutral ones."""
    params = frontend.default_params
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    differing = {
        name: getattr(params, name)
        for name, value in neutral.items()
        if getattr(params, name) != value
    }
    return json.dumps(differing) if differing else ""


def _id_in(described: Mapping[str, Any], name: str) -> int:
    """An id of config.json; 0, which the protocol has for none, where it is missing or a list."""
    value = described.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _load(stats: CoreStats, max_rows: int) -> vllm_engine_pb2.SchedulerLoad:
    used = 1.0 - stats.free_pages / max(stats.total_pages, 1)
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=stats.num_running,
        num_waiting_reqs=stats.num_waiting,
        num_total_reqs=stats.num_running + stats.num_waiting,
        token_usage=used,
        cache_hit_rate=stats.prefix_hits / max(stats.prefix_queries, 1),
        utilization=stats.num_running / max_rows,
        max_running_requests=max_rows,
    )


class _Rate:
    """Tokens per second between two readings."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._since = time.monotonic()
        self._last = 0.0

    def add(self, num_tokens: int) -> None:
        """Counts tokens that went out."""
        self._num_tokens += num_tokens

    def per_second(self) -> float:
        """Since the last reading, or that reading where it was a moment ago."""
        now = time.monotonic()
        if now - self._since >= _SECONDS_PER_RATE:
            self._last = self._num_tokens / (now - self._since)
            self._num_tokens, self._since = 0, now
        return self._last


# Cache events.


class _Batches:
    """Numbers one subscription's batches and turns cache records into events.

    Pages of windows and recurrent groups are left out: prefixes are looked up in full attention
    alone, and the gateway takes the page size from the first page it sees.
    """

    def __init__(self, start: int) -> None:
        self._sequence = start
        self._num_events = 0
        self._groups: frozenset[int] = frozenset()

    def snapshot(self, content: CacheContent) -> Iterator[common_pb2.KvEventBatch]:
        """Everything there is, in place of what the subscriber knew."""
        self._groups = frozenset(
            index
            for index, group in enumerate(content.groups)
            if group.window is None and not group.is_recurrent
        )
        pages = [page for page in content.pages if page.group in self._groups]
        count = max(1, -(-len(pages) // _PAGES_PER_BATCH))
        for index in range(count):
            some = pages[index * _PAGES_PER_BATCH : (index + 1) * _PAGES_PER_BATCH]
            cleared = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
            stored = [common_pb2.KvCacheEvent(stored=one) for one in _stored(some)]
            batch = self._batch(stored if index else cleared + stored)
            batch.snapshot.index, batch.snapshot.count = index, count
            batch.snapshot.blocks = len(pages)
            yield batch

    def changes(self, events: Sequence[CacheEvent]) -> Iterator[common_pb2.KvEventBatch]:
        """One batch of what is new; none where it is about other groups."""
        made = list(self._changes(events))
        for event in made:
            self._num_events += 1
            event.event_id = self._num_events
        if made:
            yield self._batch(made)

    def _changes(self, events: Sequence[CacheEvent]) -> Iterator[common_pb2.KvCacheEvent]:
        run: list[PageStored] = []
        for event in events:
            if isinstance(event, PageStored):
                if event.group in self._groups:
                    run.append(event)
                continue
            yield from (common_pb2.KvCacheEvent(stored=one) for one in _stored(run))
            run.clear()
            match event:
                case PageRemoved(group, key) if group in self._groups:
                    removed = common_pb2.KvBlocksRemoved(
                        block_hashes=[_block_hash(key)], group_idx=group
                    )
                    yield common_pb2.KvCacheEvent(removed=removed)
                case CacheCleared():
                    yield common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
        yield from (common_pb2.KvCacheEvent(stored=one) for one in _stored(run))

    def _batch(self, events: Iterable[common_pb2.KvCacheEvent]) -> common_pb2.KvEventBatch:
        self._sequence += 1
        return common_pb2.KvEventBatch(
            sequence_number=self._sequence, timestamp=time.time(), events=events, dp_rank=0
        )


def _stored(pages: Iterable[PageStored]) -> Iterator[common_pb2.KvBlocksStored]:
    """One message for each run of pages that follow each other in a sequence."""
    message, last = None, None
    for page in pages:
        follows = last is not None and (page.group, page.parent) == (last.group, last.key)
        if message is None or not follows:
            if message is not None:
                yield message
            message = common_pb2.KvBlocksStored(
                tier=common_pb2.KV_CACHE_TIER_DEVICE,
                group_idx=page.group,
                kv_cache_spec_kind="full_attention",
            )
            if page.parent is not None:
                message.parent_block_hash = _block_hash(page.parent)
            if page.cache_salt:
                # The salt is its tenant's secret; a digest keeps the namespaces apart.
                message.cache_salt = hashlib.sha256(page.cache_salt).hexdigest()
        token_ids = np.frombuffer(page.token_ids, np.int32)
        message.blocks.add(
            block_hash=_block_hash(page.key), token_ids=token_ids, block_size=len(token_ids)
        )
        last = page
    if message is not None:
        yield message


def _block_hash(key: bytes) -> int:
    """i64: the first half of a page's key."""
    return int.from_bytes(key[:8], "little", signed=True)
