"""Every form of layer runs the kernels where its sizes are covered, seen without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.dispatch import Dispatch
from models import gguf, registry
from tests.kernels import dispatched

ROWS, TOKENS = 8, 512


@pytest.fixture(scope="module", params=dispatched.PROMISES, ids=str)
def calls(request, smollm2_gguf):
    """A model's promised ops and the calls of its steps."""
    promise = dispatched.PROMISES[request.param]
    config = promise.config or gguf.config_from_gguf(smollm2_gguf)
    model = registry.of_config(config)
    found = [call for rows in (1, ROWS) for call in dispatched.traced(model, rows, TOKENS)]
    return promise.ops, found


def test_covered_model_runs_every_promised_kernel(calls):
    ops, found = calls
    print(dispatched.summary(found))
    assert dispatched.broken(found, ops) == []


def test_promise_is_broken_by_a_decline_and_by_a_kernel_that_never_ran(calls):
    ops, found = calls
    some = next(call for call in found if call.op == ops[0])
    gap = dispatched.Call(some.op, "reference", ("head_dim is 80",), True, "bfloat16[8, 80]")
    assert dispatched.broken([*found, gap], ops)[-1] == str(gap)
    rest = [call for call in found if call.op != ops[0]]
    assert dispatched.broken(rest, ops)[0] == f"{ops[0]}: no call of 0 ran a kernel"


def test_recorder_sees_what_was_chosen_and_why_others_declined():
    def picky(x):
        raise NotImplementedError("x is what it is")

    op = Dispatch("some.op", [("mosaic", picky), ("reference", lambda x: x)])
    with dispatched.recorded() as calls:
        assert op(np.ones(3)).sum() == 3
    op(np.ones(4))
    (call,) = [call for call in calls if call.op == "some.op"]
    assert (call.chosen, call.declined) == ("reference", ("x is what it is",))
    assert dispatched.broken(calls, ("some.op",)) == [
        "some.op: no call of 1 ran a kernel",
        "some.op ran reference for float64[3] (x is what it is)",
    ]
