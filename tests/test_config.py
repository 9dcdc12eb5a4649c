"""EngineConfig refuses what no engine can run, by field, value and limit."""

import pytest

from engine.config import EngineConfig, Limits


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "int8", "dtype is 'int8', it must be one of auto, float32, bfloat16"),
        ("policy", "lifo", "policy is 'lifo', it must be one of fcfs, priority"),
        ("load_format", "pickle", "load_format is 'pickle', it must be one of auto, dummy"),
        ("max_rows", 2.5, "max_rows is 2.5, it must be a whole number, at least 1"),
        ("max_rows", "8", "max_rows is '8', it must be a whole number"),
        ("depth", True, "depth is True, it must be a whole number, 1 to 3"),
        ("depth", None, "depth is None, it must be a whole number, 1 to 3"),
        ("num_pages", 1, "num_pages is 1, it must be at least 2"),
        ("memory_fraction", "x", r"memory_fraction is 'x', it must lie in \(0, 1\]"),
        ("memory_fraction", 1.5, r"memory_fraction is 1.5, it must lie in \(0, 1\]"),
        ("row_rungs", (4, 2), r"row_rungs is \(4, 2\), it must be a tuple of rising positive"),
        ("token_rungs", 5, "token_rungs is 5, it must be a tuple of rising positive numbers"),
        ("limits", Limits(n=1000), "limits.n is 1000; it can be lowered, not raised above 128"),
    ],
)
def test_setting_out_of_bounds_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **{name: value})


def test_lowered_limits_are_taken():
    assert EngineConfig(model="m", limits=Limits(n=2)).limits.n == 2
