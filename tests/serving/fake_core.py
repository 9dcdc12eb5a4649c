"""A core without a model: answers by rule, a few ids a step, with the contract of the real one."""

from __future__ import annotations

import collections
import dataclasses
import time
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.config import LIMITS, EngineConfig, Limits
from engine.request import Delta, FinishReason, Request, TokenLogprobs
from engine.scheduling.scheduler import QueueFull

BOS = 256
EOS = 257
USER = 258
ASSISTANT = 259
VOCAB_SIZE = 260
_SPECIAL = {BOS: "<s>", EOS: "</s>", USER: "<user>", ASSISTANT: "<assistant>"}

_LOST = RuntimeError("device lost: secret details of the machine")

Reply = Callable[[Request, int], Sequence[int]]
"""Output ids of one choice: (request, choice) -> ids. Letters by rule follow when they run out."""


@dataclasses.dataclass(frozen=True)
class FakeInfo:
    """The fields of the core's EngineInfo."""

    model_name: str = "fake"
    model_path: str = "/nowhere/fake"
    architecture: str = "FakeForCausalLM"
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 256
    eos_ids: tuple[int, ...] = (EOS,)
    generation_defaults: Mapping[str, Any] = types.MappingProxyType({})
    lane: str = "overlap"
    depth: int = 2
    dtype: str = "float32"
    page_size: int = 16
    num_pages: int = 64
    max_rows: int = 8
    num_programs: int = 3
    stage_seconds: Mapping[str, float] = types.MappingProxyType({"load": 0.1, "compile": 0.2})
    plan: str = "weights 1 MiB, pools 1 MiB"
    device: str = "cpu"
    weights_version: int = 0
    num_parameters: int = 1000
    prefix_cache: bool = True
    deterministic: bool = False
    masked_rows: int = 0


@dataclasses.dataclass(frozen=True)
class FakeStats:
    """The fields of the core's CoreStats."""

    num_running: int = 0
    num_waiting: int = 0
    free_pages: int = 63
    total_pages: int = 63
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    failed_launches: int = 0
    resumed_requests: int = 0
    steps: Mapping[str, int] = types.MappingProxyType({})
    device_rows: int = 0
    host_rows: int = 0
    compiles_after_ready: int = 0
    foreign_compiles: int = 0
    host_ms: Mapping[str, float] = types.MappingProxyType({})

    @property
    def host_ms_per_step(self) -> float:
        return 0.3


class FakeTokenizer:
    """Ids 0..255 are bytes, then four special tokens; the interface of `engine.text.tokenizer`."""

    vocab_size = VOCAB_SIZE
    num_stripped_spaces = 0
    has_chat_template = True

    def __init__(
        self, *, bos_id: int | None = BOS, eos_ids: tuple[int, ...] = (EOS,), adds_bos: bool = True
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.special_ids = frozenset(_SPECIAL)
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self.chat_templates = {
            "default": "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
            "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
        }
        self._adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Bytes of `text`; special tokens written out are read as such."""
        ids = [BOS] if add_special_tokens and self._adds_bos else []
        while text:
            for special, written in _SPECIAL.items():
                if text.startswith(written):
                    ids.append(special)
                    text = text[len(written) :]
                    break
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; broken bytes become U+FFFD."""
        kept = [i for i in token_ids if i < 256 or not skip_special_tokens]
        return b"".join(map(self.id_to_bytes, kept)).decode(errors="replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        """Bytes of one id."""
        return bytes([token_id]) if token_id < 256 else _SPECIAL[token_id].encode()

    def id_to_text(self, token_id: int) -> str:
        """Text of one id."""
        return self.id_to_bytes(token_id).decode(errors="replace")


@dataclasses.dataclass
class _Choice:
    request: Request
    choice: int
    ids: list[int] = dataclasses.field(default_factory=list)
    scheduled_at: float | None = None


class FakeCore:
    """Same methods as `engine.core.Core`; one thread calls everything.

    Abort of a live request leads to one finishing Delta for each open choice at the next poll;
    abort of an unknown one does nothing.

    Args:
      reply: output ids by rule; None: letters from a hash of prompt, seed, choice and position.
      ids_per_step: ids each row gains in one step, delivered in one Delta.
      step_seconds: time one step sleeps.
      fail_at_step: from this step (from 1) on steps raise, as with a broken device.
      num_failures: steps that raise.
      failure: what they raise.
      error_prompts: first prompt ids whose requests finish with "error".
    """

    def __init__(
        self,
        *,
        info: FakeInfo | None = None,
        limits: Limits = LIMITS,
        reply: Reply | None = None,
        ids_per_step: int = 1,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
        num_failures: int = 10**9,
        failure: Exception = _LOST,
        error_prompts: frozenset[int] = frozenset(),
    ) -> None:
        self.info = info or FakeInfo()
        self.model = types.SimpleNamespace(
            forward=len, logits=abs, cache_spec=max, config={"hidden_size": 4}
        )
        self.params = {"embed": 0}
        self.num_steps = 0
        self.is_closed = False
        self.aborts: list[tuple[str, str, int | None]] = []
        self.submitted: list[Request] = []
        self._limits = limits
        self._reply = reply
        self._ids_per_step = ids_per_step
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self._num_failures = num_failures
        self._failure = failure
        self.recoveries: list[str] = []
        self._num_failures_in_a_row = 0
        self._error_prompts = error_prompts
        self.is_callers_fault = False
        """Whether those are told that it is their own fault."""
        self._waiting: collections.deque[_Choice] = collections.deque()
        self._running: list[_Choice] = []
        self._deltas: list[Delta] = []

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[str, float, str], None] | None = None,
    ) -> FakeCore:
        """A core for `config`, which only gives limits and lengths."""
        for stage in ("load", "plan", "compile", "prove"):
            if progress is not None:
                progress(stage, 1.0, "fake")
        info = FakeInfo(model_name=config.model, model_path=config.model, depth=config.depth)
        if config.max_model_len is not None:
            info = dataclasses.replace(info, max_model_len=config.max_model_len)
        return cls(info=info, limits=config.limits)

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError for a live id, QueueFull over the limit."""
        self.submitted.append(request)
        if any(c.request.request_id == request.request_id for c in self._live()):
            raise ValueError(f"request_id {request.request_id!r} is live already; choose another")
        if len(self._waiting) >= self._limits.queued_requests:
            raise QueueFull(
                f"{len(self._waiting)} requests wait, the limit is {self._limits.queued_requests}"
            )
        self._waiting.extend(_Choice(request, choice) for choice in range(request.params.n))

    def abort(self, request_id: str, reason: str = "abort", choice: int | None = None) -> None:
        """Ends a request or one choice of it."""
        self.aborts.append((request_id, reason, choice))
        for one in self._live():
            if one.request.request_id == request_id and choice in (None, one.choice):
                delta = Delta(request_id, one.choice, finish_reason=_reason(reason))
                self._finish(one, delta._replace(scheduled_at=one.scheduled_at))

    def step(self) -> bool:
        """One id, or `ids_per_step`, for every row; False when nothing is live."""
        while self._waiting and len(self._running) < self.info.max_rows:
            self._running.append(self._waiting.popleft())
            self._running[-1].scheduled_at = time.perf_counter()
        if not self._running:
            return False
        self.num_steps += 1
        if self._fail_at_step is not None and (
            0 <= self.num_steps - self._fail_at_step < self._num_failures
        ):
            raise self._failure
        self._num_failures_in_a_row = 0
        time.sleep(self._step_seconds)
        for one in list(self._running):
            self._advance(one)
        return True

    def recover(self, reason: str) -> None:
        """Keeps every request; the third failure with no step between is the end."""
        self.recoveries.append(reason)
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= 3:
            raise RuntimeError(f"3 steps failed in a row, the last one by {reason}")

    @property
    def is_idle(self) -> bool:
        """No request is live."""
        return not self._live()

    def poll(self) -> list[Delta]:
        """Deltas since the last poll."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def stats(self) -> FakeStats:
        """Counters now."""
        return FakeStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            failed_launches=len(self.recoveries),
            steps={"overlap": self.num_steps, "sync": 0, "eager": 0},
            device_rows=self.num_steps,
            host_rows=len(self.submitted),
            host_ms={"schedule": 0.1, "hand_over": 0.1, "launch": 0.3, "wait": 0.1, "settle": 0.1},
        )

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Marks the core closed."""
        self.is_closed = True

    def _live(self) -> list[_Choice]:
        return [*self._running, *self._waiting]

    def _finish(self, one: _Choice, delta: Delta) -> None:
        if one in self._running:
            self._running.remove(one)
        else:
            self._waiting.remove(one)
        self._deltas.append(delta)

    def _advance(self, one: _Choice) -> None:
        request, params = one.request, one.request.params
        if int(request.prompt_ids[0]) in self._error_prompts:
            error = f"request {request.request_id}: a logit was not finite"
            delta = Delta(request.request_id, one.choice, finish_reason="error", error=error)
            self._finish(one, delta._replace(is_callers_fault=self.is_callers_fault))
            return
        is_first = not one.ids
        new: list[int] = []
        reason: FinishReason | None = None
        stop_id: int | None = None
        while reason is None and len(new) < self._ids_per_step:
            if len(one.ids) >= request.max_tokens:
                reason = "length"
                break
            token_id = self._next_id(one)
            one.ids.append(token_id)
            new.append(token_id)
            if token_id in request.stop_ids:
                reason, stop_id = "stop", token_id
            elif len(one.ids) >= request.max_tokens:
                reason = "length"
        delta = Delta(
            request_id=request.request_id,
            choice=one.choice,
            token_ids=tuple(new),
            logprobs=()
            if params.logprobs is None
            else tuple(fake_logprobs(i, params.logprobs) for i in new),
            prompt_logprobs=_prompt_logprobs(request) if is_first and one.choice == 0 else None,
            finish_reason=reason,
            stop_id=stop_id,
            scheduled_at=one.scheduled_at,
        )
        if reason is None:
            self._deltas.append(delta)
        else:
            self._finish(one, delta)

    def _next_id(self, one: _Choice) -> int:
        request, position = one.request, len(one.ids)
        scripted = self._reply(request, one.choice) if self._reply else ()
        if position < len(scripted):
            token_id = int(scripted[position])
        else:
            seed = 0 if request.params.is_greedy else request.seed
            key = f"{request.prompt_ids.tolist()} {seed} {one.choice} {position}"
            token_id = ord("a") + zlib.crc32(key.encode()) % 26
        is_masked = position < request.params.min_tokens and token_id in (
            *request.stop_ids,
            *request.eos_ids,
        )
        return ord("m") if is_masked else token_id


def fake_logprobs(token_id: int, num_alternatives: int) -> TokenLogprobs:
    """The log-probability every fake position reports for `token_id`: -(1 + id / 1000)."""
    top_ids = tuple((token_id + i) % VOCAB_SIZE for i in range(num_alternatives))
    top_logprobs = tuple(-(1.0 + token_id / 1000) - i for i in range(num_alternatives))
    return TokenLogprobs(-(1.0 + token_id / 1000), 1, top_ids, top_logprobs)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    wanted = request.params.prompt_logprobs
    if wanted is None:
        return None
    start = request.params.prompt_logprobs_start
    return tuple(
        None if position == 0 else fake_logprobs(int(request.prompt_ids[position]), wanted)
        for position in range(start, len(request.prompt_ids))
    )


def _reason(reason: str) -> FinishReason:
    return "stop" if reason == "stop" else "abort"
