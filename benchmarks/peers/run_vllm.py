"""Runs vLLM on the same work as benchmarks/offline.py and keeps its figures beside ours.

    python benchmarks/peers/run_vllm.py --model benchmarks/configs/qwen3_8b.json \
        --shapes 1x32+256,256x128+256 --json benchmarks/peers/vllm_h200.json

The work is equal: the same distinct random ids as prompts, random weights of the same config.json,
greedy, end ids ignored, prefix caching off, a few tokens to warm up, medians of `--repeats` runs.
Figures of other models and shapes that the file holds already are kept. Exit status 2 where vLLM
is not installed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import offline, startup  # noqa: E402

if TYPE_CHECKING:
    from engine.serving.commands.bench import Shape

_NOT_THERE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures every shape and writes the file after each one."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("error: vLLM is not installed here; run this where it is", file=sys.stderr)
        return _NOT_THERE
    for report in measured(options):
        text = json.dumps(merged(options.json, report), indent=1) + "\n"
        if options.json is None:
            print(text)
        else:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, type=pathlib.Path, help="config.json; weights are random")
    add("--shapes", default="baseline", help="baseline, or NxIN+OUT,NxIN+OUT,...")
    add("--repeats", type=int, default=3, help="measured runs of each shape")
    add("--max-model-len", type=int, default=8192)
    add("--max-rows", type=int, default=256, help="vLLM's max_num_seqs")
    add("--seed", type=int, default=0, help="of the prompts and of the weights")
    add("--json", type=pathlib.Path, help="where the figures go; default: standard output")
    return parser


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Starts vLLM and yields the report after every shape."""
    import torch
    import vllm

    shapes = offline.shapes(options.shapes)
    vocab_size = json.loads(options.model.read_text(encoding="utf-8"))["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(options.model, pathlib.Path(folder) / "config.json")
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_prefix_caching=False,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_rows,
            seed=options.seed,
        )
        _run(llm, offline.prompts(vocab_size, shapes[0], options.seed)[:1], 1)
        started = startup.process_seconds()
        figures: dict[str, Any] = {}
        for shape in shapes:
            figures[str(shape)] = measure(llm, vocab_size, shape, options.repeats, options.seed)
            print(shape, figures[str(shape)], file=sys.stderr, flush=True)
            yield {
                "engine": f"vLLM {importlib.metadata.version('vllm')}",
                "device": torch.cuda.get_device_name(0),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "conditions": (
                    f"torch {torch.__version__}, random weights in bfloat16, greedy, ignore_eos, "
                    f"prefix caching off, max_model_len {options.max_model_len}, max_num_seqs "
                    f"{options.max_rows}, offline LLM.generate"
                ),
                "models": {
                    options.model.stem: {"startup_seconds": round(started, 1), "shapes": figures}
                },
            }


def measure(llm: Any, vocab_size: int, shape: Shape, repeats: int, seed: int) -> dict[str, float]:
    """Medians of one shape, as a peer's file keeps them."""
    num_output = shape.num_output_tokens
    _run(llm, offline.prompts(vocab_size, shape, seed), min(offline.WARM_UP_TOKENS, num_output))
    seconds = statistics.median(
        _run(llm, offline.prompts(vocab_size, shape, seed + 1 + repeat), num_output)
        for repeat in range(repeats)
    )
    rates = offline.rates(shape, seconds)
    if num_output == 1:  # a prefill is counted in all its tokens
        return {"total_tokens_per_second": rates["total_tokens_per_second"]}
    del rates["seconds"]
    return rates


def _run(llm: Any, prompts: Any, max_tokens: int) -> float:
    """Seconds for all prompts.

    Raises:
      RuntimeError: fewer tokens came than were asked for.
    """
    import vllm

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    given = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = sum(len(one.outputs[0].token_ids) for one in outputs)
    if found != max_tokens * len(given):
        raise RuntimeError(f"{found} tokens came, {max_tokens * len(given)} were asked for")
    return seconds


def merged(path: pathlib.Path | None, report: dict[str, Any]) -> dict[str, Any]:
    """The report with what the file holds of other models and shapes, if it is of this device."""
    if path is None or not path.exists():
        return report
    held = json.loads(path.read_text(encoding="utf-8"))
    if (held["device"], held["engine"]) != (report["device"], report["engine"]):
        return report
    models = dict(held["models"])
    for name, found in report["models"].items():
        shapes = models.get(name, {}).get("shapes", {}) | found["shapes"]
        models[name] = found | {"shapes": shapes}
    return report | {"models": models}


if __name__ == "__main__":
    raise SystemExit(main())
