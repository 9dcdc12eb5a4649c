"""Engine settings as command-line options, declared once for every command that runs one."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from engine.config import EngineConfig, SettingError

_MEMORY = "Memory"
_STEP = "Step loop"
_MODEL = "Model"
_MASKED_ROWS = 16

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder with config.json and safetensors, a .gguf file, or a config.json "
        "(with --load-format dummy).",
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The shared options with their defaults; None leaves the choice to the engine."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="Weights and activations. auto: bfloat16 on a GPU, float32 on a CPU.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(
            help="dummy makes random weights on the device instead of reading a checkpoint.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt plus output. Default: the model's own limit, at most 8192.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    max_rows: Annotated[
        int | None,
        typer.Option(
            help="Requests in one step. Default: 256 on a GPU, 8 on a CPU.", rich_help_panel=_MEMORY
        ),
    ] = None
    token_budget: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one step that mixes prefill and decode: more read prompts faster and "
            "hold others up longer. Default: 8192 on a GPU (2048 on one below 64 GiB), 128 on a "
            "CPU.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    page_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one cache page. Default: 64 on a GPU, 16 on a CPU.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    num_pages: Annotated[
        int | None,
        typer.Option(
            help="Cache pages. Default: what the memory plan leaves room for.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    memory_fraction: Annotated[
        float,
        typer.Option(
            help="Share of the device's memory the plan may use.", rich_help_panel=_MEMORY
        ),
    ] = 0.9
    masked_rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of one step whose output a grammar may bound (structured output); two more "
            "programs. Default: 16 for serve where the extra `grammar` is installed, else none.",
            rich_help_panel=_STEP,
        ),
    ] = None
    no_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--no-prefix-cache",
            help="Never reuse pages of equal prefixes.",
            rich_help_panel=_MEMORY,
        ),
    ] = False
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Bit-equal tokens whatever runs beside, at some cost in speed.",
            rich_help_panel=_STEP,
        ),
    ] = False
    policy: Annotated[
        Literal["fcfs", "priority"],
        typer.Option(help="Order of admission.", rich_help_panel=_STEP),
    ] = "fcfs"
    no_overlap: Annotated[
        bool,
        typer.Option(
            "--no-overlap",
            help="Settle each step before the next is launched (the sync lane).",
            rich_help_panel=_STEP,
        ),
    ] = False
    depth: Annotated[
        int,
        typer.Option(help="Launches in flight on the overlap lane, 1 to 3.", rich_help_panel=_STEP),
    ] = 2
    no_command_buffers: Annotated[
        bool,
        typer.Option(
            "--no-command-buffers",
            help="Do not record steps into CUDA graphs.",
            rich_help_panel=_STEP,
        ),
    ] = False
    sync_lane: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH",
            help="Put this architecture on the sync lane. Repeatable.",
            rich_help_panel=_STEP,
        ),
    ] = None
    require_overlap: Annotated[
        bool,
        typer.Option(
            "--require-overlap",
            help="Refuse to start when the model is not on the overlap lane.",
            rich_help_panel=_STEP,
        ),
    ] = False
    compilation_cache: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Keeps compiled programs between runs. auto: ~/.cache/treadle/xla; off: none.",
            rich_help_panel=_STEP,
        ),
    ] = "auto"

    @property
    def served_masked_rows(self) -> int:
        """Masked rows of a server, whose callers may ask for structured output."""
        if self.masked_rows is not None:
            return self.masked_rows
        return _MASKED_ROWS if importlib.util.find_spec("llguidance") else 0

    def config(self, model: str, **changes: Any) -> EngineConfig:
        """The engine settings these options name.

        Args:
          model: path of the model.
          **changes: fields of `EngineConfig` that the command itself decides.

        Raises:
          ValueError: naming the setting, its value and the limit.
        """
        cache = self.compilation_cache
        fields: dict[str, Any] = {
            "dtype": self.dtype,
            "load_format": self.load_format,
            "max_model_len": self.max_model_len,
            "max_rows": self.max_rows,
            "token_budget": self.token_budget,
            "page_size": self.page_size,
            "num_pages": self.num_pages,
            "memory_fraction": self.memory_fraction,
            "masked_rows": self.masked_rows or 0,
            "prefix_cache": not self.no_prefix_cache,
            "deterministic": self.deterministic,
            "policy": self.policy,
            "overlap": not self.no_overlap,
            "depth": self.depth,
            "command_buffers": not self.no_command_buffers,
            "sync_lanes": tuple(self.sync_lane or ()),
            "require_overlap": self.require_overlap,
            "compilation_cache": None if cache == "off" else cache,
        }
        return EngineConfig(model=model, **{**fields, **changes})


_RENAMED = {
    "prefix_cache": "--no-prefix-cache",
    "overlap": "--no-overlap",
    "command_buffers": "--no-command-buffers",
    "sync_lanes": "--sync-lane",
    "limits.queued_requests": "--max-queued",
    "max_receive_bytes": "--max-receive-mib (in bytes)",
    "num_requests": "--requests",
    "num_output_tokens": "--output-len",
}
"""Options of settings whose fields have other names."""
WITHOUT_OPTION = frozenset(
    {
        "max_chunk_rows",
        "max_chunk",
        "row_rungs",
        "token_rungs",
        "page_table_rungs",
        "max_programs",
        "helpers",
        "eager",
        "ping_seconds",
        "keepalive_seconds",
        "keepalive_timeout_seconds",
    }
)
"""Settings that no command has an option for."""


def option_of(setting: str) -> str:
    """The option that sets a field; the field's own name where there is none."""
    if setting in _RENAMED:
        return _RENAMED[setting]
    if setting in WITHOUT_OPTION or setting.startswith("limits."):
        return setting
    return f"--{setting.replace('_', '-')}"


def worded(error: Exception) -> str:
    """An error's words, its settings named as options."""
    return error.spelt(option_of) if isinstance(error, SettingError) else str(error)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the fields of `EngineOptions` to a command, which gets them as one argument `engine`."""
    own = inspect.signature(command, eval_str=True)
    hints = typing.get_type_hints(EngineOptions, include_extras=True)
    fields = dataclasses.fields(EngineOptions)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        options = EngineOptions(**{field.name: values.pop(field.name) for field in fields})
        command(**values, engine=options)

    own_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "engine"
    ]
    run.__signature__ = own.replace(parameters=[*own_parameters, *shared])  # pyright: ignore[reportAttributeAccessIssue]
    return run
