"""`treadle serve` in a process of its own over a tiny model, with lines put in front of it."""

import os
import pathlib
import subprocess
import sys
import threading

import grpc

from proto.treadle.v1 import generation_pb2_grpc as pb_grpc

_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 300.0
"""A start compiles; other work may share the machine."""

# Few programs: a start is then a matter of seconds. `off` leaves jax the cache of the test runs.
_MAIN = """
import dataclasses, sys
from engine.serving import cli
from engine.serving.commands import startup

_made = startup.make_async_llm
startup.make_async_llm = lambda config, report, tokenizer: _made(
    dataclasses.replace(config, row_rungs=(config.max_rows,), token_rungs=(64,)), report, tokenizer
)
cli.main(sys.argv[1:])
"""
_ENGINE = (
    *("--max-model-len", "96", "--token-budget", "64", "--page-size", "4"),
    *("--compilation-cache", "off"),
)


class Served:
    """The process, its lines as they come, a channel to it once it serves.

    Args:
      folder: of the model.
      *arguments: more words of the command.
      before: Python lines that run before the command.
    """

    def __init__(self, folder, *arguments, before=""):
        command = ("serve", str(folder), "--port", "0", *_ENGINE, *map(str, arguments))
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + _MAIN, *command],
            cwd=_ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = None
        self.channel = None
        self.stub = None

    def _read(self):
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def until(self, start, seconds=_SECONDS):
        """The newest line that starts so, waited for."""

        def found():
            lines = [line for line in self.lines if line.startswith(start)]
            return lines or (not self._reader.is_alive() and ["ended"])

        with self._news:
            assert self._news.wait_for(found, seconds), self.lines
            assert found() != ["ended"], self.lines
            return found()[-1]

    def __enter__(self):
        self.address = self.until("listening on ").split()[2].rstrip(";")
        self.until("serving ")
        self.channel = grpc.insecure_channel(self.address)
        self.stub = pb_grpc.GenerationServiceStub(self.channel)
        return self

    def __exit__(self, *error):
        if self.channel is not None:
            self.channel.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()
