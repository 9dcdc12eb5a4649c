"""`treadle serve` over a fake core: at SIGUSR1 its thread dies, at SIGUSR2 it fails requests."""

import signal
import sys
import threading

from engine.request import Delta
from engine.serving import cli
from engine.serving.commands import startup
from engine.serving.llm import AsyncLLM
from engine.text.tokenizer import load_tokenizer
from tests.serving import tiny_chat
from tests.serving.fake_core import FakeCore, FakeInfo


class FaultyCore(FakeCore):
    """Answers slowly enough to be met in the middle of it."""

    def __init__(self):
        song = tiny_chat.tokenizer().encode("la " * 100).ids
        info = FakeInfo(model_name="tiny")
        super().__init__(info=info, reply=lambda request, choice: song, step_seconds=0.02)
        self.dies, self.fails = threading.Event(), threading.Event()

    def poll(self):
        if self.dies.is_set():
            raise RuntimeError("secret of the machine")
        deltas = super().poll()
        return list(map(self._failed, deltas)) if self.fails.is_set() else deltas

    def _failed(self, delta: Delta) -> Delta:
        for one in self._live():
            if one.request.request_id == delta.request_id:
                self._running.remove(one)
        return Delta(delta.request_id, delta.choice, finish_reason="error", error="not finite")


if __name__ == "__main__":
    core = FaultyCore()
    signal.signal(signal.SIGUSR1, lambda *_: core.dies.set())
    signal.signal(signal.SIGUSR2, lambda *_: core.fails.set())
    startup.check_files = lambda config: load_tokenizer(config.path)
    startup.make_async_llm = lambda config, report, tokenizer: AsyncLLM(
        config, tokenizer=tokenizer, core_factory=lambda config, progress: core
    )
    cli.main(sys.argv[1:])
