import pytest

from tests.serving import soak

_SECONDS = 60.0
_PLANTED_SECONDS = 3.0
_CALL_SECONDS = 10.0


def test_crowd_loses_leaks_and_repeats_nothing(tmp_path, capsys):
    one = soak.soak(tmp_path, _SECONDS)
    with capsys.disabled():
        print("", *one.report(), sep="\n")
    assert one.faults == []
    assert one.missing() == []
    assert one.num_served >= 400
    assert min(one.points.values()) >= 10


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("page", "left behind when all was quiet: {'vllm:kv_cache_usage_perc'"),
        ("call", "not answered in 10 s"),
        ("twice", "was answered differently"),
    ],
)
def test_planted_fault_is_found(tmp_path, plant, fault):
    one = soak.soak(tmp_path, _PLANTED_SECONDS, plant=plant, call_seconds=_CALL_SECONDS)
    assert any(fault in found for found in one.faults), list(one.report())
