"""EngineConfig with every open choice resolved for one model on one device, and its lane."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.config import EngineConfig, Lane, Setting, SettingError
from engine.execution.buckets import Ladder
from engine.scheduling.schedule import RowKind, Schedule
from models.batch import Tiling
from models.registry import Model, Registration

_LOG = logging.getLogger(__name__)
_STEPS_OF_HELPER = 2
"""Fewer take less time than a helper's own start."""
_MAX_MODEL_LEN, _MAX_ROWS = Setting("max_model_len"), Setting("max_rows")


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Choices that depend on the kind of device."""

    name: str
    dtype: str
    page_size: int
    max_rows: int
    row_rungs: tuple[int, ...]
    """Decode rungs below max_rows. None of 1 on a CPU: one-row programs copy weights there."""
    token_budget: int
    token_rungs: tuple[int, ...]
    max_chunk_rows: int
    install_rows: int
    """Requests that one run of the install program brings."""
    tiling: Tiling
    compiler_options: Mapping[str, Any]
    probe_options: Mapping[str, Any]
    """For programs compiled only to learn their temporaries: as quick as can be."""
    memory_bytes: int
    """What the allocator may hand out."""
    pool_bytes: int | None
    """Bound of all pools; None: whatever the plan leaves."""
    small_blocks: tuple[int, ...] = ()
    """Sizes in bytes of the device blocks that a step's input and output go to, see `Runner`."""
    helpers: int = 0
    """Processes that lower steps beside this one, where there are enough steps for them."""
    helper_environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keeps them off the device."""
    loads_at_once: int = 1
    """Kept programs that are loaded at the same time."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """EngineConfig with every None resolved for one model on one device."""

    config: EngineConfig
    profile: DeviceProfile
    dtype: str
    max_model_len: int
    max_rows: int
    max_slots: int
    token_budget: int
    max_chunk_rows: int
    page_size: int
    max_pages: int
    """Pages of one request of max_model_len."""
    lane: Lane
    depth: int
    ladder: Ladder
    helpers: int
    """Processes that lower steps beside this one."""

    @classmethod
    def of(cls, config: EngineConfig, model: Model, profile: DeviceProfile) -> Settings:
        """Resolves and checks the settings.

        Raises:
          ValueError: a setting exceeds what the model or another setting allows.
        """
        model_limit = model.config.max_position_embeddings
        max_model_len = config.max_model_len or min(model_limit, 8192)
        if max_model_len > model_limit:
            raise SettingError(
                _MAX_MODEL_LEN,
                f" is {max_model_len} but the model's positions end at {model_limit}; lower ",
                _MAX_MODEL_LEN,
            )
        max_rows = config.max_rows or profile.max_rows
        bound = model.registration.max_rows
        if bound is not None and max_rows > bound:
            raise SettingError(
                _MAX_ROWS,
                f" is {max_rows} but {model.registration.architecture} runs {bound} rows a step; "
                "start with ",
                _MAX_ROWS,
                f"={bound}",
            )
        most = min(profile.token_budget, max_rows * max_model_len)
        token_budget = config.token_budget or max(most, max_rows)
        page_size = config.page_size or profile.page_size
        max_pages = -(-max_model_len // page_size)
        lane = choose_lane(config, model)
        vocab_size = model.vocab_size
        ladder = _ladder(config, profile, max_rows, token_budget, max_pages, vocab_size)
        return cls(
            config=config,
            profile=profile,
            dtype=profile.dtype if config.dtype == "auto" else config.dtype,
            max_model_len=max_model_len,
            max_rows=max_rows,
            max_slots=max_rows + -(-max_rows // 4),
            token_budget=token_budget,
            max_chunk_rows=min(
                config.max_chunk_rows or profile.max_chunk_rows, max_rows, token_budget
            ),
            page_size=page_size,
            max_pages=max_pages,
            lane=lane,
            depth=config.depth if lane == "overlap" else 1,
            ladder=ladder,
            helpers=_helpers(config, profile, ladder),
        )


def _helpers(config: EngineConfig, profile: DeviceProfile, ladder: Ladder) -> int:
    """As many as the machine has room for; each is to lower two steps at least, to be worth it."""
    if config.helpers is not None:
        return config.helpers
    number = min(profile.helpers, len(ladder.keys()) // _STEPS_OF_HELPER)
    return number if number > 1 else 0


def _up_to(last: int, rungs: tuple[int, ...]) -> tuple[int, ...]:
    return (*(rung for rung in rungs if rung < last), last)


def _ladder(
    config: EngineConfig,
    profile: DeviceProfile,
    max_rows: int,
    token_budget: int,
    max_pages: int,
    vocab_size: int,
) -> Ladder:
    rows = config.row_rungs or _up_to(max_rows, profile.row_rungs)
    tokens = config.token_rungs or _up_to(token_budget, profile.token_rungs)
    widths = config.page_table_rungs or (max_pages,)
    for name, rungs, last in (
        ("row_rungs", rows, max_rows),
        ("token_rungs", tokens, token_budget),
        ("page_table_rungs", widths, max_pages),
    ):
        if rungs[-1] < last:
            raise SettingError(
                Setting(name), f" ends at {rungs[-1]} but steps reach {last}; add that rung"
            )
    ladder = Ladder(
        rows=tuple(rows),
        tokens=tuple(tokens),
        widths=tuple(widths),
        query_lens=(1,),
        max_chunk_rows=min(config.max_chunk_rows or profile.max_chunk_rows, max_rows, token_budget),
        deterministic=config.deterministic,
    )
    if len(ladder.keys()) > config.max_programs:  # before masks, which ask for theirs by name
        most = Setting("max_programs")
        raise SettingError(
            f"the ladder has {len(ladder.keys())} programs but ",
            most,
            f" is {config.max_programs}; give fewer ",
            Setting("row_rungs"),
            ", ",
            Setting("token_rungs"),
            " or ",
            Setting("page_table_rungs"),
            ", or raise ",
            most,
        )
    if not config.masked_rows:
        return ladder
    return dataclasses.replace(
        ladder,
        masked_rows=min(config.masked_rows, max_rows),
        mask_words=-(-vocab_size // 32),
    )


def choose_lane(config: EngineConfig, model: Model) -> Lane:
    """The lane of a model under an engine's settings.

    Raises:
      ValueError: require_overlap is set and the model runs on another lane, with the reason.
    """
    architecture = model.registration.architecture
    lane: Lane = "overlap"
    reason = ""
    if config.eager:
        lane, reason = "eager", "eager is set"
    elif not config.overlap:
        lane, reason = "sync", "overlap is off"
    elif architecture in config.sync_lanes:
        lane, reason = "sync", f"sync_lanes names {architecture}"
    elif not model.registration.device_token_ids:
        lane, reason = "sync", f"{architecture} does not declare device_token_ids"
    if config.require_overlap and lane != "overlap":
        raise SettingError(Setting("require_overlap"), f" is set but the lane is {lane}: {reason}")
    if not model.registration.device_token_ids:
        _LOG.warning(
            "%s runs on the %s lane: it does not declare device_token_ids, so every id comes from "
            "the host and no step overlaps the next",
            architecture,
            lane,
        )
    return lane


def refuse_undeclared(schedule: Schedule, registration: Registration) -> None:
    """Keeps device-owned ids from a forward that does not declare that it reads them.

    A step whose ids are all true on the host passes, whatever the registration declares.

    Raises:
      ValueError: the first row whose newest id only the device knows.
    """
    if registration.device_token_ids:
        return
    is_stale = (schedule.kinds & RowKind.DEVICE_ID) != 0
    if is_stale.any():
        row = int(np.flatnonzero(is_stale)[0])
        raise ValueError(
            f"row {row} (slot {schedule.slots[row]}) takes its id from the device but "
            f"{registration.architecture} does not declare device_token_ids; run it with every id "
            "from the host"
        )
