import asyncio
import functools

from engine.request import Delta
from engine.serving import llm, pace


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def made():
    wall, cpu = Clock(), Clock()
    return pace.Pace(wall, cpu), wall, cpu


def test_loop_that_computes_little_never_waits():
    one, wall, cpu = made()
    one.mark()
    wall.now, cpu.now = 1.0, 0.4
    assert one.pause() == 0.0


def test_loop_that_computed_all_the_time_waits_as_long_again():
    one, wall, cpu = made()
    one.mark()
    wall.now = cpu.now = 0.02
    assert abs(one.pause() - 0.02) < 1e-9
    wall.now = 0.04
    assert one.pause() == 0.0


def test_few_streams_are_not_held_back_however_short_the_steps_are():
    one, wall, cpu = made()
    one.mark()
    wall.now = cpu.now = 0.9 * pace.SMALL_COST
    assert one.pause() == 0.0
    wall.now = cpu.now = 1.1 * pace.SMALL_COST
    assert one.pause() > 0.0


def test_tokens_are_never_held_back_longer_than_the_longest_pause():
    one, wall, cpu = made()
    wall.now = cpu.now = 60.0
    assert one.pause() == pace.LONGEST_PAUSE


def test_events_that_come_in_a_pause_are_delivered_together_and_none_is_lost(monkeypatch):
    pauses = iter([0.0, 0.02])
    monkeypatch.setattr(pace.Pace, "pause", lambda self: next(pauses, 0.0))

    async def main():
        mailbox = llm._AsyncMailbox(asyncio.get_running_loop())
        reader = llm._Reader()
        post = functools.partial(mailbox.post, reader)
        post(Delta("r", 0, (1,)))
        first = await reader.take()
        post(Delta("r", 0, (2,)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reader._events, "the pause was skipped"
        post(Delta("r", 0, (3,)))
        second = await reader.take()
        post(Delta("r", 0, (4,), finish_reason="length"))
        third = await reader.take()
        return [[event.token_ids[0] for event, _ in taken] for taken in (first, second, third)]

    assert asyncio.run(asyncio.wait_for(main(), 20.0)) == [[1], [2, 3], [4]]
