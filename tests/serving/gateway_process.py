"""The gateway and engines as processes of their own, and what their callers see."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import openai

# Longer than a start on a busy machine without compiled programs at hand.
_START_SECONDS = 400.0
SECONDS = 60.0
ASK = [{"role": "user", "content": "Tell me a story"}]


class Process:
    """A command of ours whose lines go to a file; keywords are variables of its environment."""

    def __init__(self, log, *words, **environment):
        self.log = log
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=out,
                stderr=out,
                env=os.environ | environment,
                start_new_session=True,
            )

    def wait_for(self, words):
        end = time.monotonic() + _START_SECONDS
        while words not in self.log.read_text(errors="replace"):
            assert self.popen.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(SECONDS)


class Gateway:
    """A gateway's HTTP port, asked with a key."""

    def __init__(self, port, metrics_port=None, key="none"):
        self.port = port
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=SECONDS
        )

    def chat(self, messages=ASK, **options):
        options = {"max_tokens": 16, "temperature": 0.0} | options
        return self.client.chat.completions.create(model="tiny", messages=messages, **options)

    def post(self, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), self._headers)
            answer = connection.getresponse()
            return answer.status, json.load(answer)

    def events(self, path, messages=ASK, **options):
        """Lines of a streamed answer as (name, value), as they come."""
        body = {"model": "tiny", "messages": messages, "stream": True} | options
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            self._headers,
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            for line in filter(None, map(bytes.strip, answer)):
                name, _, value = line.decode().partition(": ")
                yield name, value

    def until_ready(self):
        """Returns once it answers."""
        end = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(openai.APIError):
                self.chat(max_tokens=1)
                return
            assert time.monotonic() < end
            time.sleep(0.1)

    def count(self, name):
        return count(self._metrics, name)


def count(url, name):
    """A counter or gauge of Prometheus metrics, summed over its labels."""
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        text = answer.read().decode()
    return sum(float(one) for one in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


def ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def until(is_true, seconds=SECONDS):
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if is_true():
                return
        assert time.monotonic() < end
        time.sleep(0.05)


def end_of(stream):
    """Why a stream says it ended; the error that it ended with instead."""
    try:
        reasons = [one.finish_reason for chunk in stream for one in chunk.choices]
    except openai.APIError as error:
        return error
    return [reason for reason in reasons if reason]
