"""Settings of one engine, frozen when built, and the one table of limits that borders enforce."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Literal

Lane = Literal["overlap", "sync", "eager"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting as an error names it."""

    name: str
    """The field."""

    def __str__(self) -> str:
        return self.name


class SettingError(ValueError):
    """A ValueError whose words name settings, which a face may spell in its caller's way.

        SettingError(Setting("max_rows"), " is 0, it must be at least 1")

    Args:
      *parts: text and settings, in order.
    """

    def __init__(self, *parts: str | Setting) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts

    def spelt(self, spell: Callable[[str], str]) -> str:
        """The words, each setting as `spell` of its field's name."""
        return "".join(spell(one.name) if isinstance(one, Setting) else one for one in self.parts)

    def behind(self, lead: str) -> SettingError:
        """The same with words before it."""
        return SettingError(lead, *self.parts)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Upper bounds a caller can meet. Every border checks against this table, nowhere else."""

    prompts_per_call: int = 100_000
    """Prompts in one `LLM` call."""
    queued_requests: int = 100_000
    """Requests waiting for admission."""
    n: int = 128
    """Choices of one request."""
    logprobs: int = 20
    """Alternatives reported for one position."""
    stop_strings: int = 16
    """Stop strings of one request."""
    stop_string_chars: int = 256
    """Characters of one stop string."""
    stop_ids: int = 32
    """Stop ids of one request, end-of-sequence ids of the model included."""
    bad_words: int = 32
    """Bad words of one request."""
    bad_word_ids: int = 8
    """Token ids of one bad word."""
    logit_bias: int = 320
    """Biased ids of one request."""
    allowed_ids: int = 512
    """Allowed ids of one request."""
    request_id_chars: int = 256
    """Characters of a request id chosen by the caller."""
    cache_salt_bytes: int = 256
    """Bytes of a cache salt."""
    chat_messages: int = 4096
    """Messages of one conversation."""
    structure_bytes: int = 65_536
    """UTF-8 bytes of a JSON schema, regular expression, grammar or list of choices."""
    structure_choices: int = 1024
    """Strings that a choice is made from."""
    grammar_symbols: int = 50_000
    """Symbols and rule places of a compiled grammar."""
    grammar_compile_ms: int = 10_000
    """Milliseconds that a grammar may take to compile, the wait for a free worker included."""
    grammar_mask_ms: int = 1000
    """Milliseconds that one mask of a grammar may take. It is made beside the steps."""
    grammar_accept_ms: int = 25
    """Milliseconds of its thread that a grammar may take to go past one id: all others stand."""


LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """All that shapes an engine. Complete when built; change it with `dataclasses.replace`."""

    model: str
    """Directory of config.json and safetensors, a .gguf, or a config.json for dummy weights."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights on the device instead of reading a checkpoint."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and activations. `auto`: bfloat16 on a GPU, float32 on a CPU."""
    max_model_len: int | None = None
    """Tokens of prompt plus output. None: the model's own limit, at most 8,192."""
    max_rows: int | None = None
    """Rows of one step. None: 256 on a GPU, 8 on a CPU."""
    token_budget: int | None = None
    """Tokens of one mixed step. None: 2,048 on a GPU, 128 on a CPU."""
    max_chunk_rows: int | None = None
    """Prefill chunks that share one step. None: 16 on a GPU, 8 on a CPU."""
    max_chunk: int | None = None
    """Tokens of one prefill chunk. None: bounded by `token_budget` alone."""
    page_size: int | None = None
    """Tokens of one page. None: 64 on a GPU, 16 on a CPU."""
    num_pages: int | None = None
    """Pages of each cache group, page 0 included. None: what the memory plan leaves room for."""
    memory_fraction: float = 0.9
    """Share of the device's memory the plan may use."""
    row_rungs: tuple[int, ...] | None = None
    """Padded row counts of decode programs. None: powers of two up to `max_rows`."""
    token_rungs: tuple[int, ...] | None = None
    """Padded token counts of mixed programs. None: chosen by the runner."""
    page_table_rungs: tuple[int, ...] | None = None
    """Padded page-table widths of decode programs. None: one, the width of `max_model_len`."""
    max_programs: int = 25
    """Step programs compiled before ready; a ladder that needs more is refused."""
    masked_rows: int = 0
    """Rows of one step whose ids a grammar may bound (structured output). 0: such requests are
    refused. Any other value compiles three programs beyond `max_programs`, a deterministic engine
    none; the rows of a step that no grammar bounds are not limited by it."""
    prefix_cache: bool = True
    """Reuse pages of equal prefixes."""
    deterministic: bool = False
    """One decode and one prefill program, never mixed: bit-equal tokens whatever runs beside."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission."""
    overlap: bool = True
    """False puts every registration on the sync lane."""
    depth: int = 2
    """Launches in flight on the overlap lane, 1 to 3."""
    sync_lanes: tuple[str, ...] = ()
    """Architectures put on the sync lane."""
    eager: bool = False
    """Run the step un-jitted (tests and debugging)."""
    require_overlap: bool = False
    """Refuse to start when the model is not on the overlap lane."""
    command_buffers: bool = True
    """Record steps into CUDA graphs."""
    compilation_cache: str | None = "auto"
    """Directory of the persistent compilation cache; `auto`: ~/.cache/treadle/xla; None: off."""
    helpers: int | None = None
    """Processes that lower programs at a first start beside this one. None: on a GPU up to twelve
    by the machine's processors, on a CPU none."""
    seed: int = 0
    """Seed of dummy weights."""
    limits: Limits = LIMITS
    """Bounds enforced on requests."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model is empty; give a directory, a .gguf file or a config.json")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingError(
                    Setting(name),
                    f" is {getattr(self, name)!r}, it must be one of {', '.join(choices)}",
                )
        for name, (low, high) in _COUNTS.items():
            _check_count(name, getattr(self, name), low, high)
        fraction = self.memory_fraction
        if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
            raise SettingError(
                Setting("memory_fraction"), f" is {fraction!r}, it must lie in (0, 1]"
            )
        for field in dataclasses.fields(Limits):
            bound, most = getattr(self.limits, field.name), getattr(LIMITS, field.name)
            if bound < 0:
                raise SettingError(
                    Setting(f"limits.{field.name}"), f" is {bound}, a limit cannot be negative"
                )
            if bound > most:
                raise SettingError(
                    Setting(f"limits.{field.name}"),
                    f" is {bound}; it can be lowered, not raised above {most}",
                )
        for name in ("row_rungs", "token_rungs", "page_table_rungs"):
            _check_rungs(name, getattr(self, name))

    @property
    def path(self) -> pathlib.Path:
        """The model's place on disk."""
        return pathlib.Path(self.model).expanduser()


_CHOICES = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16"),
    "policy": ("fcfs", "priority"),
}
_COUNTS = {
    "max_model_len": (1, None),
    "max_rows": (1, None),
    "token_budget": (1, None),
    "max_chunk_rows": (1, None),
    "max_chunk": (1, None),
    "page_size": (1, None),
    "num_pages": (2, None),  # page 0 is trash
    "max_programs": (1, None),
    "masked_rows": (0, 256),
    "helpers": (0, 64),
    "depth": (1, 3),
}
"""Bounds of whole numbers; None is no bound."""


def _check_count(name: str, value: object, low: int, high: int | None) -> None:
    if value is None and name != "depth":
        return
    span = f"at least {low}" if high is None else f"{low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingError(Setting(name), f" is {value!r}, it must be a whole number, {span}")
    if value < low or (high is not None and value > high):
        raise SettingError(Setting(name), f" is {value}, it must be {span}")


def _check_rungs(name: str, rungs: tuple[int, ...] | None) -> None:
    if rungs is None:
        return
    is_whole = isinstance(rungs, tuple) and all(type(rung) is int for rung in rungs)
    if not is_whole or not rungs or list(rungs) != sorted(set(rungs)) or rungs[0] < 1:
        raise SettingError(
            Setting(name), f" is {rungs!r}, it must be a tuple of rising positive numbers"
        )
