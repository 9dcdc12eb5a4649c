"""What serving costs: N streams over gRPC beside the offline rate for the same work.

    python benchmarks/served.py --model benchmarks/configs/qwen3_8b.json --shape 256x128+256 \
        --json benchmarks/results/qwen3_8b_h200_served.json

Offline is `treadle bench`, served is `treadle serve` with every request there at once, both in
processes of their own, one after the other, with random ids, greedy, end ids ignored. The streams
are read by `--clients` further processes, so that reading is not what is measured; they share the
machine's cores with the server. The share is served over offline output tokens per second, each
from the first request to the last token; medians of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a machine that only borrows the tree has nothing installed

from benchmarks import conditions  # noqa: E402
from engine.serving import load, versions  # noqa: E402
from engine.serving.commands.bench import Shape  # noqa: E402

_READY_SECONDS = 600.0
_COMMAND = (sys.executable, "-m", "engine.serving.cli")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures both ways and writes the report."""
    options, engine = _parser().parse_known_args(arguments)
    shape = Shape.parse(options.shape)
    if options.client:
        asyncio.run(_client(options, shape))
        return
    if options.model.endswith(".json"):
        engine = [*engine, "--load-format", "dummy"]
    offline = [] if options.served_only else _offline(options, engine)
    served = list(_served(options, engine, shape))
    report = {
        "benchmark": "served",
        "conditions": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": [pathlib.Path(sys.argv[0]).name, *conditions.without_folders(sys.argv[1:])],
            "device": conditions.of_driver("name") or "cpu",
            "driver": conditions.of_driver("driver_version"),
            "versions": versions.versions(),
            "commit": conditions.commit(),
            "model": pathlib.Path(options.model).stem,
            "shape": str(shape),
            "clients": options.clients,
        },
        "offline": offline,
        "served": served,
        "share": _share(served, offline),
    }
    text = json.dumps(report, indent=1) + "\n"
    if options.json is None:
        print(text)
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other words go to `treadle bench` and `treadle serve` alike, as --max-model-len.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="config.json (dummy weights), folder or .gguf")
    add("--shape", default="256x128+256", help="NxIN+OUT: streams, prompt, output tokens")
    add("--repeats", type=int, default=3)
    add("--clients", type=int, default=4, help="processes that read the streams")
    add("--served-only", action="store_true", help="no offline run beside it")
    add("--json", type=pathlib.Path, help="where the report goes; default: standard output")
    add("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    add("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _share(served: list[dict[str, float]], offline: list[dict[str, float]]) -> float | None:
    if not offline:
        return None
    rates = [[one["output_tokens_per_second"] for one in runs] for runs in (served, offline)]
    return statistics.median(rates[0]) / statistics.median(rates[1])


def _offline(options: argparse.Namespace, engine: list[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bench.json"
        shapes = ["--shape", options.shape] * options.repeats
        command = [*_COMMAND, "bench", options.model, *shapes, "--json", str(path), *engine]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return [
        {name: one[name] for name in ("output_tokens_per_second", "seconds")} for one in results
    ]


def _served(
    options: argparse.Namespace, engine: list[str], shape: Shape
) -> Iterator[dict[str, float]]:
    with _running_server(options.model, engine) as address:
        _crowd(options, shape, address, seed=0)  # the first one opens connections
        for seed in range(1, 1 + options.repeats):
            result = _crowd(options, shape, address, seed)
            print(f"served: {result}", file=sys.stderr)
            yield result


@contextlib.contextmanager
def _running_server(model: str, engine: list[str]) -> Iterator[str]:
    command = [*_COMMAND, "serve", model, "--port", "0", *engine]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stderr is not None
        # Read to the end, or a full pipe would stop the server.
        reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stderr or ()])
        reader.start()
        try:
            yield _address(lines)
        finally:
            process.terminate()
            process.wait()
            reader.join()


def _address(lines: queue.SimpleQueue[str]) -> str:
    """Where the server listens, once it serves."""
    address, end = "", time.monotonic() + _READY_SECONDS
    while True:
        line = lines.get(timeout=max(0.1, end - time.monotonic()))
        sys.stderr.write(line)
        if line.startswith("listening on "):
            address = line.split()[2].rstrip(";")
        if line.startswith("serving "):
            return address
        if line.startswith("error: "):
            raise RuntimeError(f"the server did not start: {line.strip()}")


def _crowd(options: argparse.Namespace, shape: Shape, address: str, seed: int) -> dict[str, float]:
    """All streams of one run, shared out among the clients, which begin together."""
    sizes = [len(range(i, shape.num_requests, options.clients)) for i in range(options.clients)]
    clients = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--client", address, "--model", options.model),
                *("--seed", str(seed * options.clients + index)),
                *("--shape", f"{size}x{shape.prompt_len}+{shape.num_output_tokens}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, size in enumerate(sizes)
        if size
    ]
    try:
        for one in clients:
            assert one.stdout is not None and one.stdout.readline() == "ready\n", "a client failed"
        for one in clients:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        found = [json.loads(one.communicate()[0]) for one in clients]
    finally:
        for one in clients:
            one.kill()
            one.wait()
    seconds = max(one["end"] for one in found) - min(one["begin"] for one in found)
    num_tokens = sum(one["num_tokens"] for one in found)
    assert num_tokens == shape.num_requests * shape.num_output_tokens, f"{num_tokens} tokens came"
    firsts = [first for one in found for first in one["first_token_seconds"]]
    return {
        "output_tokens_per_second": num_tokens / seconds,
        "seconds": seconds,
        "tokens_per_message": num_tokens / sum(one["num_messages"] for one in found),
        "median_first_token_seconds": statistics.median(firsts),
    }


async def _client(options: argparse.Namespace, shape: Shape) -> None:
    """Reads its streams once told to go; prints what it saw."""
    plan = load.Plan(
        num_requests=shape.num_requests,
        prompt_len=shape.prompt_len,
        num_output_tokens=shape.num_output_tokens,
        arrivals="closed",
        concurrency=shape.num_requests,
        seed=options.seed,
    )
    connections = load.Connections(options.client, shape.num_requests)
    try:
        model = await connections.model()
        prompts = plan.prompts(model.vocab_size)
        print("ready", flush=True)
        sys.stdin.readline()
        # Clocks of one machine's processes agree: the time since its boot.
        begin = time.clock_gettime(time.CLOCK_MONOTONIC)
        seen = await load.drive(connections.call("treadle"), plan, prompts)
    finally:
        await connections.close()
    faults = [one.detail for one in seen if one.code != "OK"]
    assert not faults, faults[0]
    report: dict[str, Any] = {
        "begin": begin,
        "end": begin + max(one.end for one in seen),
        "num_tokens": sum(one.num_tokens for one in seen),
        "num_messages": sum(len(one.arrivals) for one in seen),
        "first_token_seconds": [one.first_token_seconds for one in seen],
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
