"""A long crowd against a real server process: cancels, deadlines, broken messages, SIGTERM.

`python -m tests.serving.soak --seconds 600 --requests 5000` prints what it covered and ends with 1
when something was lost, leaked or answered twice.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_pb_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.serving import top
from proto.treadle.v1 import admin_pb2, admin_pb2_grpc
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.families import tiny
from tests.serving.served_process import Served

NUM_WORKERS = 20
CALL_SECONDS = 120.0
DRAIN_SECONDS = 1.0
TOKEN = "a-token-of-the-soak-0123456789"
GENERATE = "/treadle.v1.GenerationService/Generate"
METHODS = (
    GENERATE,
    "/treadle.v1.GenerationService/Score",
    "/treadle.v1.GenerationService/Abort",
    "/treadle.v1.GenerationService/Tokenize",
    "/treadle.v1.AdminService/Profile",
    "/vllm.grpc.engine.VllmEngine/Generate",
    "/vllm.grpc.engine.VllmEngine/Abort",
)
POINTS = ("before the first message", "after the first", "in the middle", "near the end")
CODES = {
    "OK",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
}
"""Each is met; UNKNOWN and INTERNAL never are."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A grammar that bounds an output: its field, what a whole output and any part of one match."""

    field: str
    text: str
    whole: str
    part: str

    def set(self, params):
        """Asks for it, in the parameters of either service."""
        of_ours = isinstance(params, pb.SamplingParams)
        message = params.structured if of_ours else params
        if self.field != "choice":
            setattr(message, self.field, self.text)
        elif of_ours:
            message.choice.texts.extend(self.text.split("|"))
        else:
            message.choice.choices.extend(self.text.split("|"))


FORMS = {
    "regex": Form("regex", "[a-f]{5}x", "[a-f]{5}x", "[a-fx]*"),
    "regex over the limit": Form("regex", "[a-z]{80}", "[a-z]{80}", "[a-z]*"),
    "choice": Form("choice", "yes|no|perhaps", "yes|no|perhaps", "[a-z]*"),
    "JSON schema": Form("json_schema", '{"enum": [1, 22]}', "1|22", "[12]*"),
}
"""By name; the name "" is that of an output without one."""
SERVICES = ("treadle", "vllm", "vllm stream")
NUM_SPECIAL = 5
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda one: (not one.isascii(), one))
LETTERS = _BYTES[: tiny.config("llama")["vocab_size"] - NUM_SPECIAL]
"""Text of the ids behind the special ones."""


def write_model(folder):
    """A tiny model whose ids are letters."""
    special = [f"<{number}>" for number in range(NUM_SPECIAL)]
    vocab = {text: token_id for token_id, text in enumerate((*special, *LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    folder = tiny.write_checkpoint("llama", folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a caller wants of either service."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    form: str = ""

    def ours(self, **fields):
        """The request of our service."""
        params = pb.SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        if self.n > 1:
            params.n = self.n
        self._bound(params)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=self.prompt), params=params, **fields)

    def vllm(self, **fields):
        """The request of the compatibility service."""
        params = vllm_pb.SamplingParams(max_tokens=self.max_tokens, temperature=0.0, n=self.n)
        self._bound(params)
        tokenized = vllm_pb.TokenizedInput(input_ids=self.prompt)
        return vllm_pb.GenerateRequest(tokenized=tokenized, sampling_params=params, **fields)

    def _bound(self, params):
        if self.form:
            FORMS[self.form].set(params)
        else:
            params.ignore_eos = True


class Answer:
    """What has come of our service.

    Args:
      expect: takes what is true of a good answer, and the fault it would be otherwise.
    """

    def __init__(self, expect):
        self.expect = expect
        self.tokens = collections.defaultdict(list)
        self.ends = {}
        """Reason of the end, by choice."""
        self.is_last = False

    def take(self, message):
        """One more message."""
        self.expect(not self.is_last, "a message behind the last one")
        self.is_last = message.HasField("usage")
        for choice in message.choices:
            self.more(choice.index, choice.token_ids)
            if choice.finish_reason:
                self.ends[choice.index] = choice.finish_reason

    def more(self, index, token_ids):
        """Ids of a choice."""
        self.expect(index not in self.ends, "a choice goes on after its end")
        self.tokens[index] += token_ids


class VllmAnswer(Answer):
    """What has come of the compatibility service, which ends each choice by itself.

    Args:
      expect: as above.
      n: choices that were asked for.
      is_stream: whether ids come in chunks before an end repeats them.
    """

    def __init__(self, expect, n, is_stream):
        super().__init__(expect)
        self._n, self._is_stream = n, is_stream

    def take(self, message):
        """One more message."""
        if message.HasField("chunk"):
            self.expect(self._is_stream, "a chunk where none was asked for")
            self.more(message.chunk.index, message.chunk.token_ids)
            return
        end = message.complete
        if not self._is_stream:
            self.more(end.index, end.output_ids)
        told = self.tokens[end.index]
        self.expect(end.index not in self.ends, "a choice ends twice")
        self.expect(told == list(end.output_ids), "chunks are not what their end repeats")
        self.expect(end.completion_tokens == len(told), "a count is not that of the ids")
        self.ends[end.index] = end.finish_reason
        self.is_last = len(self.ends) == self._n


# Says what the engine still holds when it is closed.
AUDIT = """
import json, sys
from engine.core import Core

closed = Core.close

def audited(core):
    live = len(core.scheduler._requests)
    while core._in_flight:
        core._settle_oldest()
    fault = ""
    try:
        core.scheduler.audit()
    except AssertionError as error:
        fault = str(error)
    stats = core.stats()
    found = {
        "live": live,
        "slots": core.scheduler._config.max_slots - len(core.scheduler._free_slots),
        "pages": stats.total_pages - stats.free_pages,
        "fault": fault,
    }
    print("audit:", json.dumps(found), file=sys.stderr, flush=True)
    closed(core)

Core.close = audited
"""
PLANTS = {
    "page": """
from engine.scheduling.pages import PagePool
release, calls = PagePool.release, []

def leaking(pool, pages):
    pages = list(pages)
    calls.append(1)
    release(pool, pages[:-1] if len(calls) % 40 == 0 and pages else pages)

PagePool.release = leaking
""",
    "call": """
import asyncio
from engine.serving.llm import AsyncLLM
score, calls = AsyncLLM.score, []

async def forgetful(self, *arguments, **options):
    calls.append(1)
    if len(calls) % 3 == 0:
        await asyncio.Event().wait()
    return await score(self, *arguments, **options)

AsyncLLM.score = forgetful
""",
    "twice": """
from engine.serving import messages
made, calls = messages.generate_response, []

def doubled(output, fields, **options):
    message = made(output, fields, **options)
    calls.append(1)
    if len(calls) % 100 == 0:
        for choice in message.choices:
            choice.token_ids.extend(list(choice.token_ids))
    return message

messages.generate_response = doubled
""",
    "chunk": """
from engine.serving import vllm_service
made, calls = vllm_service._Answer.messages, []

def doubled(self, output):
    for message in made(self, output):
        yield message
        calls.append(1)
        if len(calls) % 10 == 0 and message.HasField("chunk"):
            yield message

vllm_service._Answer.messages = doubled
""",
    "mask": """
from engine.text.grammar import GrammarMatcher
made, accept, calls = GrammarMatcher.mask, GrammarMatcher.accept, []

def open_mask(self):
    words = made(self)
    calls.append(1)
    return words | ~words if len(calls) % 5 == 0 else words

GrammarMatcher.mask = open_mask
GrammarMatcher.accept = lambda self, token_id: accept(self, token_id) or True
""",
}
"""Faults on purpose, which the soak must find."""


class Soak:
    """One crowd.

    Args:
      served: the server, started with `ARGUMENTS`.
      seed: of every choice made.
      call_seconds: a call that takes longer counts as lost.
    """

    def __init__(self, served, seed, call_seconds):
        self.served = served
        self.call_seconds = call_seconds
        self.draw = random.Random(seed)
        self.prompts = [tiny.random_ids("llama", length).tolist() for length in (2, 5, 9, 17, 30)]
        self.truth = {}
        """Output by prompt and form: the engine is deterministic."""
        self.faults = []
        self.codes = collections.Counter()
        self.points = collections.Counter()
        self.actions = collections.Counter()
        self.wholes = collections.Counter()
        """Whole answers by service and form."""
        self.num_begun = self.num_ended = self.num_served = 0
        self.is_ending = self.is_over = False

    async def run(self, seconds):
        """Load for a while, quiet, load again and SIGTERM in the middle of it."""
        async with contextlib.AsyncExitStack() as stack:
            channels = [grpc.aio.insecure_channel(self.served.address) for _ in range(4)]
            for channel in channels:
                stack.push_async_callback(channel.close)
            self.channels = channels
            await self._load(seconds)
            self.num_served = self.num_ended
            await self._check_quiet()
            load = asyncio.create_task(self._load(3600.0))
            await asyncio.sleep(2.0)
            self.is_ending = True
            self.served.process.send_signal(signal.SIGTERM)
            while self.served.process.poll() is None and not load.done():
                await asyncio.sleep(0.05)
            self.is_over = True
            await asyncio.wait_for(load, 2 * self.call_seconds)
        code = await asyncio.to_thread(self.served.process.wait, 60.0)
        self._expect(code == 0, f"the process ended with {code}")
        audit = json.loads(self.served.until("audit: ").removeprefix("audit: "))
        self._expect(audit == {"live": 0, "slots": 0, "pages": 0, "fault": ""}, f"left: {audit}")
        self._expect(self.num_begun == self.num_ended, "a request was never answered")

    async def _load(self, seconds):
        end = time.monotonic() + seconds

        async def worker():
            while time.monotonic() < end and not self.is_over:
                await self._act()
                if self.is_ending:  # most are refused at once by now
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(worker() for _ in range(NUM_WORKERS)))

    async def _act(self):
        kinds = {
            self._whole: 5,
            self._vllm: 5,
            self._cancel: 8,
            self._deadline: 4,
            self._broken: 4,
            self._invalid: 1,
            self._abort: 2,
            self._same_id: 1,
            self._score: 1,
            self._stranger: 1,
            self._burst: 0.4,
            self._flush: 0.3,
        }
        (act,) = self.draw.choices(list(kinds), list(kinds.values()))
        self.actions[act.__name__.strip("_")] += 1
        try:
            await asyncio.wait_for(act(), 2 * self.call_seconds)
        except TimeoutError:
            self.faults.append(f"{act.__name__} was not answered in {2 * self.call_seconds:.0f} s")

    def _stub(self):
        return pb_grpc.GenerationServiceStub(self.draw.choice(self.channels))

    def _asked(self):
        """A request of any kind."""
        return Asked(
            tuple(self.draw.choice(self.prompts)),
            self.draw.choice((1, 2, 5, 12, 30, 60)),
            self.draw.choice((2, 3)) if self.draw.random() < 0.2 else 1,
            self.draw.choice(list(FORMS)) if self.draw.random() < 0.2 else "",
        )

    def _open(self, asked, *, timeout=None, **fields):
        self.num_begun += 1
        timeout = self.call_seconds if timeout is None else timeout
        return self._stub().Generate(asked.ours(**fields), metadata=METADATA, timeout=timeout)

    async def _read(self, call, asked, stop_at=None, *, may_be_late=False):
        """Reads a stream of our service to its end, or cancels it after `stop_at` messages."""
        answer = Answer(self._expect)
        code = await self._taken(call, answer, stop_at, may_be_late=may_be_late)
        self._compare("treadle", asked, answer, is_whole=code == "OK" and stop_at is None)
        return code

    async def _taken(self, call, answer, stop_at=None, *, may_be_late=False):
        """The status a call ends with; `answer` takes its messages."""
        num_messages = 0
        try:
            if stop_at == 0:
                call.cancel()
            async for message in call:
                num_messages += 1
                answer.take(message)
                if num_messages == stop_at:
                    call.cancel()
            code = (await call.code()).name
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            code = "CANCELLED"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            self._expect(code not in ("UNKNOWN", "INTERNAL"), f"{code}: {error.details()}")
        self._end(code, may_be_late)
        return code

    def _end(self, code, may_be_late=False):
        self.num_ended += 1
        self.codes[code] += 1
        is_late = code == "DEADLINE_EXCEEDED" and not may_be_late
        self._expect(not is_late, f"not answered in {self.call_seconds:.0f} s")

    def _compare(self, service, asked, answer, *, is_whole):
        form, key = FORMS.get(asked.form), (asked.prompt, asked.form)
        for index, found in answer.tokens.items():
            self._expect(len(found) <= asked.max_tokens, "more tokens than asked for")
            truth = self.truth.get(key, [])
            shared = min(len(found), len(truth))
            self._expect(found[:shared] == truth[:shared], f"{key} was answered differently")
            if len(found) > len(truth):
                self.truth[key] = found
            if form is not None:
                is_end = answer.ends.get(index) == "stop"
                pattern = form.whole if is_end else form.part
                self._expect(re.fullmatch(pattern, _text(found)), f"not of the form {asked.form}")
        if is_whole:
            self._expect(answer.is_last, "an answer without its end")
            self._expect(len(answer.ends) == asked.n, "a choice without an end")
            self.wholes[service, asked.form] += 1

    async def _whole(self):
        asked = self._asked()
        await self._read(self._open(asked), asked)

    async def _vllm(self):
        """A call of the compatibility service, most often a whole one."""
        asked, is_stream = self._asked(), self.draw.random() < 0.7
        stop_at, timeout = None, self.call_seconds
        match self.draw.randrange(5):
            case 0:
                stop_at = self.draw.randint(0, asked.max_tokens)
            case 1:
                timeout = self.draw.choice((0.005, 0.02, 0.1))
        self.num_begun += 1
        stub = vllm_pb_grpc.VllmEngineStub(self.draw.choice(self.channels))
        name = f"vllm-{self.draw.getrandbits(64)}"
        request = asked.vllm(request_id=name, stream=is_stream)
        call = stub.Generate(request, metadata=METADATA, timeout=timeout)
        answer = VllmAnswer(self._expect, asked.n, is_stream)
        is_late = timeout < self.call_seconds
        code = await self._taken(call, answer, stop_at, may_be_late=is_late)
        service = "vllm stream" if is_stream else "vllm"
        self._compare(service, asked, answer, is_whole=code == "OK" and stop_at is None)

    async def _cancel(self):
        form = "regex over the limit" if self.draw.random() < 0.2 else ""
        asked = dataclasses.replace(
            self._asked(), max_tokens=self.draw.choice((12, 30, 60)), form=form
        )
        point = min(POINTS, key=lambda one: (self.points[one], self.draw.random()))
        place = POINTS.index(point)
        stop_at = (0, 1, asked.max_tokens // 2, asked.max_tokens - 1)[place]
        call = self._open(asked)
        if place == 0:
            await asyncio.sleep(self.draw.random() * 0.02)
        code = await self._read(call, asked, stop_at)
        if code == "CANCELLED":
            self.points[point] += 1

    async def _deadline(self):
        asked = self._asked()
        timeout = self.draw.choice((0.001, 0.005, 0.02, 0.1, 0.3))
        await self._read(self._open(asked, timeout=timeout), asked, may_be_late=True)

    async def _broken(self):
        """Bytes of a good message with a few of them changed, cut off or put in."""
        data = bytearray(self._asked().ours(request_id="broken").SerializeToString())
        for _ in range(self.draw.randint(1, 4)):
            place = self.draw.randrange(len(data) + 1)
            match self.draw.randrange(4):
                case 0:
                    data[place : place + 1] = self.draw.randbytes(1)
                case 1:
                    del data[place:]
                case 2:
                    data[place:place] = self.draw.randbytes(self.draw.randint(1, 9))
                case _:
                    data = bytearray(self.draw.randbytes(self.draw.randint(0, 60)))
        method = self.draw.choice(METHODS)
        channel = self.draw.choice(self.channels)
        options = {"timeout": 5.0, "metadata": METADATA}
        self.num_begun += 1
        try:
            if method.endswith("Generate"):
                async for _ in channel.unary_stream(method)(bytes(data), **options):
                    pass
            else:
                await channel.unary_unary(method)(bytes(data), **options)
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            self._expect(code not in ("UNKNOWN", "INTERNAL"), f"{method} {code}: {error.details()}")
        self._end(code, may_be_late=True)

    async def _invalid(self):
        request = self._asked().ours()
        match self.draw.randrange(5):
            case 0:
                request.params.temperature = float("nan")
            case 1:
                request.params.n = 10**6
            case 2:
                request.token_ids.ids.append(10**6)
            case 3:
                request.token_ids.ClearField("ids")
            case _:
                request.params.ClearField("ignore_eos")
                request.params.structured.regex = "("
        self.num_begun += 1
        call = self._stub().Generate(request, timeout=self.call_seconds, metadata=METADATA)
        code = await self._taken(call, Answer(self._expect))
        is_refused = code == "INVALID_ARGUMENT" or self.is_ending
        self._expect(is_refused, f"bad input was {code}")

    async def _abort(self):
        asked, name = self._asked(), f"abort-{self.draw.getrandbits(64)}"
        reading = asyncio.create_task(self._read(self._open(asked, request_id=name), asked))
        await asyncio.sleep(self.draw.random() * 0.05)
        with contextlib.suppress(grpc.aio.AioRpcError):
            message = pb.AbortRequest(request_id=name)
            await self._stub().Abort(message, timeout=self.call_seconds, metadata=METADATA)
        await reading

    async def _same_id(self):
        asked, name = self._asked(), f"same-{self.draw.getrandbits(64)}"
        calls = [self._open(asked, request_id=name) for _ in range(2)]
        await asyncio.gather(*(self._read(call, asked) for call in calls))

    async def _score(self):
        item = pb.ScoreItem(
            prompt_ids=pb.TokenIds(ids=self.prompts[2]),
            continuation_ids=pb.TokenIds(ids=self.prompts[0]),
        )
        await self._unary(self._stub().Score, pb.ScoreRequest(items=[item] * 3))

    async def _stranger(self):
        self.num_begun += 1
        call = self._stub().Generate(self._asked().ours(), timeout=self.call_seconds)
        code = await self._taken(call, Answer(self._expect))
        self._expect(code == "UNAUTHENTICATED" or self.is_ending, f"a stranger got {code}")

    async def _burst(self):
        burst = [self._asked() for _ in range(40)]
        await asyncio.gather(*(self._read(self._open(one), one) for one in burst))

    async def _flush(self):
        stub = admin_pb2_grpc.AdminServiceStub(self.draw.choice(self.channels))
        await self._unary(stub.FlushPrefixCache, admin_pb2.FlushPrefixCacheRequest())

    async def _unary(self, method, message):
        self.num_begun += 1
        try:
            await method(message, timeout=self.call_seconds, metadata=METADATA)
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            self._expect(code not in ("UNKNOWN", "INTERNAL"), f"{code}: {error.details()}")
        self._end(code)

    async def _check_quiet(self):
        """Nothing runs, waits or is held once nobody asks for anything."""
        url = self.served.until("metrics on ").removeprefix("metrics on ")
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "treadle:calls_in_flight",
        )
        end = time.monotonic() + 10.0
        while True:
            sample = await asyncio.to_thread(top.read, url)
            left = {name: sample.total(name) for name in names if sample.total(name)}
            if not left:
                break
            if time.monotonic() > end:
                self.faults.append(f"left behind when all was quiet: {left}")
                break
            await asyncio.sleep(0.1)
        for fault in ("treadle:failed_launches_total", "treadle:compiles_after_ready_total"):
            self._expect(sample.total(fault) == 0, f"{fault} moved")

    def _expect(self, is_true, fault):
        if not is_true:
            self.faults.append(fault)

    def missing(self):
        """What a long enough crowd meets and this one did not."""
        forms = {form for _, form in self.wholes}
        services = {service for service, _ in self.wholes}
        masked = {service for service, form in self.wholes if form}
        return sorted(
            (CODES - self.codes.keys())
            | (set(POINTS) - self.points.keys())
            | {f"a whole answer of {one}" for one in {*SERVICES, *FORMS} - services - forms}
            | {f"a masked answer of {one}" for one in set(SERVICES) - masked}
        )

    def report(self):
        """What was covered and found, for people."""
        yield (
            f"{self.num_ended} requests of {self.num_begun} answered, {self.num_served} of them "
            "before the end"
        )
        for title, counts in (
            ("actions", self.actions),
            ("status codes", self.codes),
            ("cancelled", self.points),
            ("whole", {f"{a} {b or 'free'}": n for (a, b), n in self.wholes.items()}),
        ):
            yield f"{title}: " + ", ".join(f"{k} {n}" for k, n in sorted(counts.items()))
        for fault, count in collections.Counter(self.faults).most_common(20):
            yield f"FAULT ({count}): {fault}"


def _text(token_ids):
    """What ids say, those of an end left out."""
    return "".join(LETTERS[one - NUM_SPECIAL] for one in token_ids if one >= NUM_SPECIAL)


METADATA = (("authorization", f"Bearer {TOKEN}"),)


def soak(folder, seconds, *, plants=(), seed=0, call_seconds=CALL_SECONDS):
    """Runs a whole crowd over a server of its own; returns it.

    Args:
      folder: takes the model and the token file.
      seconds: of load, before the end under SIGTERM.
      plants: faults of `PLANTS`.
      seed: of the crowd.
      call_seconds: a call that takes longer counts as lost.
    """
    folder = pathlib.Path(folder)
    model = write_model(folder)
    tokens = folder / "tokens"
    tokens.write_text(TOKEN + "\n", encoding="utf-8")
    arguments = (
        *("--max-rows", 8, "--num-pages", 90, "--max-queued", 24, "--deterministic", "--admin"),
        *("--token-file", tokens, "--metrics-port", 0, "--drain-seconds", DRAIN_SECONDS),
    )
    # Each in names of its own.
    planted = "".join(f"exec({PLANTS[one]!r}, {{}})\n" for one in plants)
    with Served(model, *arguments, before=AUDIT + planted) as served:
        one = Soak(served, seed, call_seconds)
        asyncio.run(one.run(seconds))
    return one


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--requests", type=int, default=5000, help="fewer are a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant", choices=sorted(PLANTS), nargs="*", default=())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = soak(folder, given.seconds, plants=given.plant, seed=given.seed)
    if one.num_served < given.requests:
        one.faults.append(f"{one.num_served} requests in {given.seconds:.0f} s are too few")
    one.faults += [f"never met: {what}" for what in one.missing()]
    sys.stdout.writelines(f"{line}\n" for line in one.report())
    return 1 if one.faults else 0


if __name__ == "__main__":
    sys.exit(main())
