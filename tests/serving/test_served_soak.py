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


# A start takes longer than the crowd: faults that do not hide each other share one.
@pytest.mark.parametrize(
    "faults",
    [
        {
            "page": "left behind when all was quiet: {'vllm:kv_cache_usage_perc'",
            "chunk": "chunks are not what their end repeats",
            "mask": "not of the form",
        },
        {"call": "not answered in 10 s"},
        {"twice": "was answered differently"},
    ],
    ids=" and ".join,
)
def test_planted_faults_are_found(tmp_path, faults):
    one = soak.soak(tmp_path, _PLANTED_SECONDS, plants=faults, call_seconds=_CALL_SECONDS)
    for fault in faults.values():
        assert any(fault in found for found in one.faults), list(one.report())
