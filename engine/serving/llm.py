"""The faces of an engine in this process: `LLM` for scripts and notebooks, `AsyncLLM` to serve."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

import numpy as np

from engine.config import EngineConfig, SettingError
from engine.request import Delta, SamplingParams
from engine.serving.frontend import Frontend, Params, Prepared, Prompt
from engine.serving.outputs import (
    OutputAssembler,
    RequestFailed,
    RequestOutput,
    RequestRefused,
    ScoreOutput,
)
from engine.serving.pace import Pace
from engine.serving.thread import JOIN_SECONDS, EngineDead, EngineThread, Sink

if TYPE_CHECKING:
    import rich.progress

    from engine.core import Core, CoreStats, EngineInfo
    from engine.scheduling.cache_events import CacheContent, CacheWatch
    from engine.text.chat import ChatTemplate, Message
    from engine.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

Progress = Callable[[str, float, str], None]
"""(stage, fraction 0..1, detail), called from the engine's thread while it starts."""
CoreFactory = Callable[..., "Core"]
"""Called as `core_factory(config, progress=progress)`."""
StreamMode = Literal["delta", "cumulative", "final"]
"""What a stream yields: what is new, everything so far, or only the finished output."""

# Tokenizing more text in one turn of the event loop would keep its other streams waiting.
_LONG_TEXT_CHARS = 1024


class RenderedChat(TypedDict):
    """A conversation ready to be a prompt: template text, and its ids without a second bos."""

    prompt: str
    prompt_token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class StudyModel:
    """The served model for study: the very functions and parameters the engine runs.

        llm.model.forward(llm.model.params, cache, token_ids, batch, tap=look)

    Nothing here is donated by the engine. Drop it before `close()` is to free the memory.
    """

    forward: Callable[..., Any]
    """(params, cache, token_ids, batch, *, tap) -> (hidden, cache), pure."""
    logits: Callable[..., Any]
    """(params, hidden) -> logits, pure."""
    cache_spec: Callable[..., Any]
    """(page_size, dtype) -> the cache groups `forward` needs."""
    params: Any
    """Parameters by dotted path, on the device."""
    config: Any
    """The architecture's sizes."""

    def __repr__(self) -> str:
        return f"StudyModel({self.config!r})"


class _Face:
    """What both faces share: an engine thread, the checks at its border and the tokenizer."""

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig,
        *,
        progress: Progress | None = None,
        tokenizer: Tokenizer | None = None,
        core_factory: CoreFactory | None = None,
        **settings: Any,
    ) -> None:
        """Starts the engine; returns when every program is compiled and proved.

        Args:
          model: path of the checkpoint, or complete settings.
          progress: told of the stages load, plan, compile and prove.
          tokenizer: None takes the checkpoint's; a checkpoint without one serves ids alone.
          core_factory: makes the core; None makes the real one.
          **settings: fields of `EngineConfig`.

        Raises:
          ValueError, OSError: settings or files are wrong.
          RuntimeError: the device or its memory is not there.
        """
        if isinstance(model, EngineConfig):
            self._config = dataclasses.replace(model, **settings)
        else:
            self._config = EngineConfig(model=os.fspath(model), **settings)
        self._tokenizer = _load_tokenizer(self._config) if tokenizer is None else tokenizer
        start = functools.partial(core_factory or _start_core, self._config, progress=progress)
        self._thread = EngineThread(start)
        try:
            self._info = self._thread.wait_ready()
            self._frontend = Frontend(self._info, self._tokenizer, self._config.limits)
        except BaseException:
            self._thread.close(0.0)
            raise
        self._finalizer = weakref.finalize(self, self._thread.close)

    @property
    def config(self) -> EngineConfig:
        """The settings as they were given."""
        return self._config

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine: lengths, lane, pages, start-up times, memory plan."""
        return self._info

    @property
    def frontend(self) -> Frontend:
        """The checks every request passes."""
        return self._frontend

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None when it has none."""
        return self._tokenizer

    @property
    def model(self) -> StudyModel:
        """The served model as pure functions and parameters."""
        return self._thread.call(_study_model).result()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt that the checkpoint's chat template makes of a conversation.

        Args:
          messages: each with `role` and `content`.
          tools: descriptions of functions the template may show.
          add_generation_prompt: whether the prompt ends where the assistant's answer begins.
          template_variables: more names the template may read, such as `enable_thinking`.

        Raises:
          ValueError: no chat template, a malformed message, or more messages than the limit.
        """
        if isinstance(messages, list | tuple):
            self._frontend.check_messages(messages)
        text = self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=template_variables,
        )
        return {
            "prompt": text,
            "prompt_token_ids": self._frontend.encode(text, "chat", add_special_tokens=False),
        }

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        from engine.text.chat import ChatTemplate

        return ChatTemplate.of(self._frontend.tokenizer("chat"))

    def _submission(self, prepared: Prepared, sink: Sink) -> _Submission:
        return _Submission(prepared, self._tokenizer, self._thread, sink)

    def __repr__(self) -> str:
        info = self._info
        state = "" if self._thread.healthy else f", {self._thread.failure}"
        return (
            f"{type(self).__name__}({info.model_name}, {info.dtype}, lane {info.lane}, "
            f"depth {info.depth}, {info.num_pages} pages of {info.page_size}{state})"
        )


class LLM(_Face):
    """One model, ready to answer: prompts in, outputs in the same order out.

    Closes itself at the end of a `with` block, when it is garbage, or by `close()`.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Once upon", "In the end"], SamplingParams(seed=1)):
                print(output.outputs[0].text)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        use_progress_bar: bool = True,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> list[RequestOutput]:
        """One output for each prompt, in order.

        All prompts are checked before the first one runs. A request that fails inside the engine
        has the finish reason "error" and its `error`; the others are not disturbed.

        Args:
          prompts: a prompt or a list of them; a prompt is text, ids, or a mapping with one.
          params: for all prompts, or a list with one for each.
          use_progress_bar: shows one where there is a terminal or notebook.
          priority: lower runs earlier under the priority policy.
          cache_salt: requests share prefix pages only within one salt.

        Raises:
          ValueError, TypeError: a prompt or field is wrong.
          EngineDead: the engine failed or was closed.
        """
        several = self._several(prompts)
        each = _params_for_each(params, len(several))
        prepare = functools.partial(
            self._frontend.prepare, priority=priority, cache_salt=cache_salt
        )
        prepared = _prepared_all("prompts", prepare, zip(several, each, strict=True), len(several))
        return [
            assembler.output()
            for assembler in self._run(prepared, "generate", use_progress_bar=use_progress_bar)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        use_progress_bar: bool = True,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> list[RequestOutput]:
        """Answers a conversation or a list of them; see `render_chat` and `generate`."""
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else list(messages)
        self._frontend.check_count(len(conversations))
        prompts = [
            self.render_chat(
                conversation,  # pyright: ignore[reportArgumentType]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template_variables=template_variables,
            )
            for conversation in conversations
        ]
        return self.generate(
            prompts,
            params,
            use_progress_bar=use_progress_bar,
            priority=priority,
            cache_salt=cache_salt,
        )

    def score(
        self,
        prompts: Any,
        continuations: Any = None,
        *,
        logprobs: int = 0,
        use_progress_bar: bool = True,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> list[ScoreOutput]:
        """Log-likelihoods of continuations, in order.

            llm.score("The capital of France is", [" Paris", " Rome"])
            llm.score([("Two and two is", " four"), ("Three and three is", " six")])

        Args:
          prompts: one prompt for all continuations, a list as long as theirs, or, without
            continuations, a list of pairs. A prompt is text or ids.
          continuations: one or a list; text where the prompt is text, else ids.
          logprobs: alternatives reported at each position.
          use_progress_bar: shows one where there is a terminal or notebook.
          priority: lower runs earlier under the priority policy.
          cache_salt: requests share prefix pages only within one salt.

        Raises:
          ValueError, TypeError: a prompt or continuation is wrong.
          RequestFailed: the engine failed one of the requests.
          EngineDead: the engine failed or was closed.
        """
        pairs = self._pairs(prompts, continuations)
        prepare = functools.partial(
            self._frontend.prepare_score,
            logprobs=logprobs,
            priority=priority,
            cache_salt=cache_salt,
        )
        prepared = _prepared_all("pairs", prepare, pairs, len(pairs))
        return [
            assembler.score()
            for assembler in self._run(prepared, "score", use_progress_bar=use_progress_bar)
        ]

    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> Iterator[RequestOutput]:
        """What is new of one prompt's output, as it comes; leaving the loop ends the request.

        Raises:
          ValueError, TypeError: the prompt or a field is wrong.
          RequestFailed: the engine failed this request.
          EngineDead: the engine failed or was closed.
        """
        prepared = self._frontend.prepare(prompt, params, priority=priority, cache_salt=cache_salt)
        return self._stream(prepared)

    def stats(self) -> CoreStats:
        """Counters of the engine now."""
        return self._thread.call(lambda core: core.stats()).result()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        self._thread.call(lambda core: core.reset_prefix_cache()).result()

    def close(self) -> None:
        """Ends what runs and frees the device's memory; idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _several(self, prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
        if _is_one(prompts):
            return [prompts]  # pyright: ignore[reportReturnType]
        if not isinstance(prompts, list | tuple | np.ndarray):
            raise TypeError(
                f"prompts is a {type(prompts).__name__}, it must be a prompt or a list of prompts"
            )
        if len(prompts) == 0:
            raise ValueError("prompts is empty; give at least one prompt")
        self._frontend.check_count(len(prompts))
        return prompts  # pyright: ignore[reportReturnType]

    def _pairs(self, prompts: Any, continuations: Any) -> list[tuple[Any, Any]]:
        if continuations is None:
            if not isinstance(prompts, list | tuple):
                raise TypeError("score needs continuations, or a list of (prompt, continuation)")
            self._frontend.check_count(len(prompts))
            for index, pair in enumerate(prompts):
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise TypeError(f"prompts[{index}] must be a pair (prompt, continuation)")
            return [(prompt, continuation) for prompt, continuation in prompts]
        many = self._several(continuations)
        if _is_one(prompts):
            return [(prompts, continuation) for continuation in many]
        contexts = self._several(prompts)
        if len(contexts) != len(many):
            raise ValueError(
                f"{len(contexts)} prompts have {len(many)} continuations; "
                "give as many, one prompt for all, or a list of pairs"
            )
        return list(zip(contexts, many, strict=True))

    def _run(
        self, prepared: Sequence[Prepared], label: str, *, use_progress_bar: bool
    ) -> list[OutputAssembler]:
        """Runs requests to their ends; on any way out none of them is left in the engine."""
        submissions: list[_Submission] = []
        mailbox = _Mailbox()
        num_finished = 0
        try:
            for index, one in enumerate(prepared):
                can_wait = not one.request.params.stop
                sink = functools.partial(mailbox.post, index, can_wait)
                submissions.append(self._submission(one, sink))
                submissions[-1].start()
            with _bar(label, len(prepared), is_shown=use_progress_bar) as advance:
                while num_finished < len(prepared):
                    for index, event, when in mailbox.wait():
                        if isinstance(event, Exception):
                            raise _at(index, len(prepared), event)
                        if event.finish_reason == "error":
                            _LOG.warning("request %s failed: %s", event.request_id, event.error)
                        assembler = submissions[index].assembler
                        if not assembler.is_finished:
                            assembler.push(event, when)
                            num_finished += assembler.is_finished
                            advance(assembler.is_finished, len(event.token_ids))
        finally:
            for submission in submissions:
                submission.end()
        return [submission.assembler for submission in submissions]

    def _stream(self, prepared: Prepared) -> Iterator[RequestOutput]:
        mailbox = _Mailbox()
        submission = self._submission(prepared, functools.partial(mailbox.post, 0, False))
        assembler = submission.assembler
        try:
            submission.start()
            while not assembler.is_finished:
                for _, event, when in mailbox.wait():
                    _push(assembler, event, when)
                yield assembler.delta()
        finally:
            submission.end()


class AsyncLLM(_Face):
    """One model for a service: each request an async iterator, ended by leaving it.

    Construction blocks until the engine is ready; a server that listens meanwhile constructs it
    in a thread.
    """

    _mailbox: _AsyncMailbox | None = None
    _turn_chars: int = 0
    """Characters of the texts that came in this turn of the event loop."""

    async def generate(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        mode: StreamMode = "delta",
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs of one prompt as they come.

        A reader slower than the engine gets several steps in one output. Cancelling, or closing
        the iterator, frees the request's pages.

        Args:
          prompt: text, ids, or a mapping with one.
          params: how to sample.
          mode: what each output holds.
          request_id: None draws one; refused while another request has it.
          priority: lower runs earlier under the priority policy.
          cache_salt: requests share prefix pages only within one salt.

        Raises:
          ValueError, TypeError: the prompt or a field is wrong, at the first step.
          QueueFull: too many requests wait.
          RequestFailed: the engine failed this request.
          EngineDead: the engine failed or was closed.
        """
        prepared = await self._prepared(
            self._frontend.prepare,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(self._steps(prepared)) as steps:
            async for assembler in steps:
                if mode == "delta":
                    yield assembler.delta()
                elif mode == "cumulative" or assembler.is_finished:
                    yield assembler.output()

    async def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int],
        *,
        logprobs: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | bytes = b"",
    ) -> ScoreOutput:
        """The log-likelihood of `continuation` after `prompt`; see `LLM.score`."""
        prepared = await self._prepared(
            self._frontend.prepare_score,
            prompt,
            continuation,
            logprobs=logprobs,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(self._steps(prepared)) as steps:
            async for assembler in steps:
                if assembler.is_finished:
                    return assembler.score()
        raise AssertionError("the steps of a request end with its finish")

    async def abort(self, request_id: str) -> None:
        """Ends a request, whose iterator then finishes with "abort"; an unknown one is no error."""
        self._thread.abort(request_id)

    async def stats(self) -> CoreStats:
        """Counters of the engine now."""
        return await asyncio.wrap_future(self._thread.call(lambda core: core.stats()))

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        await asyncio.wrap_future(self._thread.call(lambda core: core.reset_prefix_cache()))

    async def watch_prefix_cache(self, watch: CacheWatch) -> CacheContent:
        """Begins to tell `watch` of every change in the prefix cache; returns what is there now.

        Raises:
          EngineDead: the engine failed or was closed.
        """
        return await asyncio.wrap_future(
            self._thread.call(lambda core: core.watch_prefix_cache(watch))
        )

    def unwatch_prefix_cache(self, watch: CacheWatch) -> None:
        """Ends it soon; one that does not watch, or a dead engine, is no error."""
        with contextlib.suppress(EngineDead):
            self._thread.call(lambda core: core.unwatch_prefix_cache(watch))

    def check_health(self) -> None:
        """Returns while requests are served; raises EngineDead with the reason otherwise."""
        if not self._thread.healthy:
            raise EngineDead(self._thread.failure)

    @property
    def busy_seconds(self) -> float:
        """How long the engine is at its step; 0.0 between two of them."""
        return self._thread.busy_seconds

    @property
    def is_closed(self) -> bool:
        """True when the engine's thread has ended and the device's memory is free."""
        return self._thread.is_closed

    def shutdown(self, seconds: float = JOIN_SECONDS) -> bool:
        """Ends what runs and frees the device's memory; idempotent.

        Args:
          seconds: how long to wait for it.

        Returns:
          False when the engine has not ended by then.
        """
        self._finalizer.detach()
        return self._thread.close(seconds)

    async def _prepared(
        self, prepare: Callable[..., Prepared], *arguments: Any, **options: Any
    ) -> Prepared:
        is_long = self._is_long(sum(map(_num_chars, arguments)))
        if is_long or any(map(_is_structured, arguments)):
            return await asyncio.to_thread(prepare, *arguments, **options)
        return prepare(*arguments, **options)

    def _is_long(self, num_chars: int) -> bool:
        """True when this turn's texts, these among them, are too much for the event loop."""
        if num_chars == 0:
            return False
        if self._turn_chars == 0:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._turn_chars += num_chars
        return self._turn_chars > _LONG_TEXT_CHARS

    def _end_turn(self) -> None:
        self._turn_chars = 0

    async def _steps(self, prepared: Prepared) -> AsyncGenerator[OutputAssembler]:
        """Runs a request, yielding its assembler whenever it has taken something in."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _AsyncMailbox(loop)
        reader = _Reader()
        submission = self._submission(prepared, functools.partial(self._mailbox.post, reader))
        assembler = submission.assembler
        try:
            submission.start()
            while not assembler.is_finished:
                for event, when in await reader.take():
                    _push(assembler, event, when)
                yield assembler
        finally:
            submission.end()


class _Submission:
    """A request on its way through the engine; its events come to `sink`."""

    def __init__(
        self, prepared: Prepared, tokenizer: Tokenizer | None, thread: EngineThread, sink: Sink
    ) -> None:
        self._thread = thread
        self._sink = sink
        # By owner, so that a request of the same id that somebody else has live goes on.
        self._abort = functools.partial(thread.abort, owner=sink)
        self.assembler = OutputAssembler(prepared, tokenizer, self._abort)

    def start(self) -> None:
        """Hands the request in."""
        self._thread.submit(self.assembler.request, self._sink)

    def end(self) -> None:
        """Ends the request if it was handed in and is not finished."""
        if not self.assembler.is_finished:
            self._abort(self.assembler.request.request_id)


class _Mailbox:
    """Hands events from the engine's thread to one that waits, waking it once for many."""

    def __init__(self) -> None:
        self._events: collections.deque[tuple[int, Delta | Exception, float]] = collections.deque()
        self._wake = threading.Event()

    def post(self, index: int, can_wait: bool, event: Delta | Exception) -> None:
        """A sink: takes one event; those in the middle of a request that can wait wake nobody."""
        self._events.append((index, event, time.perf_counter()))
        is_middle = isinstance(event, Delta) and event.finish_reason is None
        if not (can_wait and is_middle) and not self._wake.is_set():
            self._wake.set()

    def wait(self) -> Iterator[tuple[int, Delta | Exception, float]]:
        """Everything there is, at least the event that woke: (index, event, time)."""
        self._wake.wait()
        # Cleared before reading: what comes in between wakes again, perhaps for nothing.
        self._wake.clear()
        while self._events:
            yield self._events.popleft()


class _Reader:
    """Events of one stream, on its event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[Delta | Exception, float]] = []
        self._wake = asyncio.Event()

    def put(self, event: Delta | Exception, when: float) -> None:
        """Adds an event; on the event loop."""
        self._events.append((event, when))
        self._wake.set()

    async def take(self) -> list[tuple[Delta | Exception, float]]:
        """Everything there is, at least one event."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, []
        return events


class _AsyncMailbox:
    """Hands events from the engine's thread to an event loop, waking it once for many streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pace = Pace()
        self._events: collections.deque[tuple[_Reader, Delta | Exception, float]] = (
            collections.deque()
        )
        self._is_awake = False

    def post(self, reader: _Reader, event: Delta | Exception) -> None:
        """A sink: takes one event; RuntimeError when the loop is closed, which ends the request."""
        self._events.append((reader, event, time.perf_counter()))
        if not self._is_awake:
            self._is_awake = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._is_awake = False  # each stream of a closed loop is to learn of it
                raise

    def _deliver(self) -> None:
        if (pause := self._pace.pause()) > 0.0:
            self.loop.call_later(pause, self._deliver_now)  # still awake: nobody else wakes it
        else:
            self._deliver_now()

    def _deliver_now(self) -> None:
        # Cleared before reading: what comes in between wakes again, perhaps for nothing.
        self._is_awake = False
        self._pace.mark()
        while self._events:
            reader, event, when = self._events.popleft()
            reader.put(event, when)


def _push(assembler: OutputAssembler, event: Delta | Exception, when: float) -> None:
    if isinstance(event, Exception):
        raise event
    if event.finish_reason == "error":
        failed = RequestRefused if event.is_callers_fault else RequestFailed
        raise failed(event.error or f"request {event.request_id} failed")
    assembler.push(event, when)


def _start_core(config: EngineConfig, *, progress: Progress | None) -> Core:
    # Imports jax, which whoever only builds parameters or reads help does not wait for.
    from engine.core import Core

    return Core.start(config, progress=progress)


def _study_model(core: Core) -> StudyModel:
    model = core.model
    return StudyModel(model.forward, model.logits, model.cache_spec, core.params, model.config)


def check_files(config: EngineConfig) -> Tokenizer | None:
    """Reads what is small of a model's files, before anything dear is begun.

    Config, architecture and the headers of the weights are those the engine opens again.

    Returns:
      The tokenizer; None where the checkpoint has none.

    Raises:
      FileNotFoundError, ValueError: nothing there, or not a model, with the way out.
    """
    from engine.execution import startup

    startup.open_model(config)
    return _load_tokenizer(config)


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    from engine.text.tokenizer import load_tokenizer

    path = config.path.parent if config.path.suffix == ".json" else config.path
    try:
        return load_tokenizer(path)
    except FileNotFoundError as error:
        # A missing model is reported by the core, which knows every place it looks.
        level = logging.INFO if config.load_format == "dummy" else logging.WARNING
        _LOG.log(level, "no tokenizer: %s; token ids alone are served", error)
        return None


def _is_one(prompts: Any) -> bool:
    """True for one prompt: text, a mapping, or a row of ids."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if not isinstance(prompts, list | tuple) or len(prompts) == 0:
        return False
    return isinstance(prompts[0], int | float | np.number)


def _num_chars(argument: Any) -> int:
    """Characters of a text, or of a prompt that has one."""
    if isinstance(argument, Mapping) and "prompt_token_ids" not in argument:
        argument = argument.get("prompt")
    return len(argument) if isinstance(argument, str) else 0


def _is_structured(params: Any) -> bool:
    """True for parameters whose grammar must be compiled, which takes a while."""
    if isinstance(params, SamplingParams):
        return params.structured is not None
    return isinstance(params, Mapping) and params.get("structured") is not None


def _params_for_each(params: Params | Sequence[Params], num_prompts: int) -> Sequence[Params]:
    if not isinstance(params, list | tuple):
        return [params] * num_prompts  # pyright: ignore[reportReturnType]
    if len(params) != num_prompts:
        raise ValueError(
            f"params has {len(params)} entries for {num_prompts} prompts; give one for each or one "
            "for all"
        )
    return params


def _prepared_all(
    name: str, prepare: Callable[..., Prepared], arguments: Any, count: int
) -> list[Prepared]:
    prepared: list[Prepared] = []
    for index, one in enumerate(arguments):
        try:
            prepared.append(prepare(*one))
        except (ValueError, TypeError) as error:
            if count == 1:
                raise
            raise _behind(f"{name}[{index}]: ", error) from error
    return prepared


def _at(index: int, count: int, error: Exception) -> Exception:
    """The error, saying which of several prompts it is about where it is about one."""
    is_about_one = count > 1 and type(error) in (ValueError, SettingError, TypeError)
    return _behind(f"prompts[{index}]: ", error) if is_about_one else error


def _behind(lead: str, error: Exception) -> Exception:
    """The same error with words before it."""
    return error.behind(lead) if isinstance(error, SettingError) else type(error)(f"{lead}{error}")


@contextlib.contextmanager
def _bar(label: str, total: int, *, is_shown: bool) -> Iterator[Callable[[bool, int], None]]:
    """A progress bar: call with whether a request finished and how many ids it gained."""
    if not is_shown:
        yield lambda is_finished, num_tokens: None
        return
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[rate]}"),
    )
    is_hidden = not (console.is_terminal or console.is_jupyter)
    with rich.progress.Progress(*columns, console=console, disable=is_hidden) as progress:
        yield _Rate(progress, progress.add_task(label, total=total, rate="")).advance


class _Rate:
    """Counts ids for a progress bar."""

    def __init__(self, progress: rich.progress.Progress, task: rich.progress.TaskID) -> None:
        self._progress = progress
        self._task = task
        self._num_tokens = 0
        self._began = time.perf_counter()

    def advance(self, is_finished: bool, num_tokens: int) -> None:
        """Adds ids; the bar itself moves with each finished request."""
        self._num_tokens += num_tokens
        if is_finished:
            seconds = time.perf_counter() - self._began
            rate = f"{self._num_tokens / max(seconds, 1e-9):,.0f} tok/s"
            self._progress.update(self._task, advance=1, rate=rate)
