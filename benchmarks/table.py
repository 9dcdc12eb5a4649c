"""Turns measured JSON into Markdown tables and charts, and fills the README's table.

    python benchmarks/table.py                       # results/*.json -> README.md and charts there
    python benchmarks/table.py --readme README.md    # also the block between its markers

Reads nothing but the files named (all of benchmarks/results/ when none is) and runs anywhere.
Charts are SVG, and PNG too where matplotlib is installed (the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax import saxutils

RESULTS = pathlib.Path(__file__).parent / "results"
BEGIN = "<!-- begin: written by benchmarks/table.py -->"
END = "<!-- end: written by benchmarks/table.py -->"
_NONE = "–"
_TITLES = {
    "offline": "Offline throughput",
    "served": "Served over gRPC beside offline",
    "masked": "Free rows beside one with a grammar",
    "startup": "Process start to first token",
    "memory": "Memory plan and what the allocator counted",
    "poison": "Late writes to arrays handed over",
    "decode_attention": "Decode attention, one layer",
    "prefill_attention": "Prefill attention, one layer",
    "mla": "Latent decode attention, one layer",
    "qkv": "Norm, rotation and KV write, one layer",
    "linear": "Products of few tokens",
    "norm": "Residual and norm",
    "moe": "Choice of experts and their products, one layer",
}
KINDS = tuple(_TITLES)
"""Benchmarks that a page shows."""

Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the tables and charts of the named reports."""
    parser = argparse.ArgumentParser(description="Measured JSON as tables and charts.")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: results/*.json")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--readme", type=pathlib.Path, help="file whose marked block is filled")
    options = parser.parse_args(arguments)
    files = options.files or sorted(options.out.glob("*.json"))
    reports = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text(page(reports), encoding="utf-8")
    for name, report in reports.items():
        if report["benchmark"] == "offline" and (bars := shares_of_bound(report)):
            (options.out / f"{name}.svg").write_text(chart(report, bars), encoding="utf-8")
            draw(options.out / f"{name}.png", report, bars)
    if options.readme is not None:
        text = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(filled(text, readme_block(reports)), encoding="utf-8")


def page(reports: dict[str, Report]) -> str:
    """Every report as Markdown, grouped by benchmark."""
    parts = [
        "# Measured results",
        "Written by `benchmarks/table.py` from the JSON beside it, which holds all conditions.",
    ]
    for kind, title in _TITLES.items():
        some = {name: report for name, report in reports.items() if report["benchmark"] == kind}
        if some:
            parts.append(f"## {title}")
        for name, report in some.items():
            parts += [f"### {name}", _table(report), _conditions(report)]
            if kind == "offline" and shares_of_bound(report):
                parts.append(f"![share of the bound]({name}.svg)")
    return "\n\n".join(parts) + "\n"


def readme_block(reports: dict[str, Report]) -> str:
    """Tables of throughput and start-up, each with its conditions: a model's first by name."""
    kinds = ("offline", "startup")
    firsts: dict[tuple[str, str], Report] = {}
    for _, report in sorted(reports.items()):
        if report["benchmark"] in kinds:
            firsts.setdefault((report["benchmark"], report["conditions"]["model"]), report)
    parts = [
        part
        for (kind, model), report in sorted(firsts.items())
        for part in (f"**{_TITLES[kind]}, {model}**", _table(report), _conditions(report))
    ]
    return "\n\n".join(parts) or "No results yet."


def filled(text: str, block: str) -> str:
    """The text with the block between its markers.

    Raises:
      ValueError: the markers are not there once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the file needs one {BEGIN!r} before one {END!r}")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def _table(report: Report) -> str:
    makers = {
        "offline": _offline_table,
        "startup": _startup_table,
        "poison": _poison_table,
        "memory": _memory_table,
        "served": _served_table,
        "masked": _masked_table,
    }
    return makers.get(report["benchmark"], _kernel_table)(report)


def _kernel_table(report: Report) -> str:
    """Times under the names that the benchmark gave them, and how many of its checks hold."""
    header = [name.replace("_", " ") for name in report["results"][0]]
    rows = ([str(value) for value in result.values()] for result in report["results"])
    num_held = sum(check["holds"] for check in report["checks"])
    return f"{_markdown(header, rows)}\n\n{num_held} of {len(report['checks'])} checks hold."


def _offline_table(report: Report) -> str:
    peer = _peer_name(report) or "peer"
    header = ("n x in+out", "tok/s", peer, "bound", "of bound", "ms per out step", peer, "host ms")
    return _markdown(header, (_offline_row(result) for result in report["results"]))


def _offline_row(result: Report) -> tuple[str, ...]:
    own, peer, bound = rates(result)
    is_prefill = _is_prefill(result)
    return (
        result["shape"].replace("x", " x "),
        _number(own, suffix=" (all)" if is_prefill else ""),
        _number(peer),
        _number(bound),
        _NONE if bound is None else f"{own / bound:.0%}",
        _NONE if is_prefill else f"{result['ms_per_output_step']:.2f}",
        _number((result["peer"] or {}).get("ms_per_output_step"), places=2),
        f"{result['host_ms_per_step']:.2f}",
    )


def _is_prefill(result: Report) -> bool:
    return result["shape"].endswith("+1")


def rates(result: Report) -> tuple[float, float | None, float | None]:
    """Tokens per second of Treadle, the peer and the bound.

    Output tokens count; all tokens do where a request gives but one.
    """
    name = "total_tokens_per_second" if _is_prefill(result) else "output_tokens_per_second"
    peer, bound = result["peer"] or {}, result["bound"] or {}
    return result[name], peer.get(name), bound.get(name)


def _startup_table(report: Report) -> str:
    stages = list(report["cold"]["stage_seconds"])
    header = ("cache", "programs", "first token s", "imports", *stages)
    rows = (
        (
            name,
            str(report[name]["num_programs"]),
            f"{report[name]['first_token_seconds']:.1f}",
            f"{report[name]['imported_seconds']:.1f}",
            *(f"{report[name]['stage_seconds'].get(stage, 0.0):.1f}" for stage in stages),
        )
        for name in ("cold", "warm")
    )
    return _markdown(header, rows)


def _memory_table(report: Report) -> str:
    rows = [
        (part["name"], _mib(part["planned"]), _mib(part["measured"])) for part in report["parts"]
    ]
    rows.append(("pools", _mib(report["pools"]), _NONE))
    rows.append(("peak in the allocator", _NONE, _mib(report["peak_bytes_in_use"])))
    if report["outside_allocator"] is not None:
        rows.append(("outside the allocator", _NONE, _mib(report["outside_allocator"])))
    return _markdown(("part", "planned MiB", "measured MiB"), rows)


def _served_table(report: Report) -> str:
    def median(way: str, name: str) -> float:
        return statistics.median(run[name] for run in report[way])

    row = (
        report["conditions"]["shape"].replace("x", " x "),
        *(f"{median(way, 'output_tokens_per_second'):,.0f}" for way in ("offline", "served")),
        f"{report['share']:.1%}",
        f"{median('served', 'tokens_per_message'):.1f}",
        f"{median('served', 'median_first_token_seconds'):.2f}",
    )
    header = ("n x in+out", "offline tok/s", "served tok/s", "share", "tokens a message", "TTFT s")
    return _markdown(header, [row])


def _masked_table(report: Report) -> str:
    header = ("free rows", "temperature", "ms a token", "beside a masked row", "slower")
    rows = (
        (
            str(result["free_rows"]),
            str(result["temperature"]),
            f"{result['token_ms_without_masked_row']:.2f}",
            f"{result['token_ms_with_masked_row']:.2f}",
            f"{result['slower_percent']:.1f}%",
        )
        for result in report["results"]
    )
    return _markdown(header, rows)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _poison_table(report: Report) -> str:
    ways = list(dict.fromkeys(result["way"] for result in report["results"]))
    seen = {
        (result["bytes"], result["way"]): f"{result['seen']} of {result['tries']}"
        for result in report["results"]
    }
    sizes = list(dict.fromkeys(result["bytes"] for result in report["results"]))
    rows = ((f"{size:,}", *(seen[size, way] for way in ways)) for size in sizes)
    return _markdown(("bytes", *(f"seen through {way}" for way in ways)), rows)


def _conditions(report: Report) -> str:
    """One sentence of what the figures depend on."""
    c = report["conditions"]
    words = [c["device"], f"jax {c['versions']['jax']}", c["date"][:10], f"commit {c['commit']}"]
    if c["driver"]:
        words.insert(1, f"driver {c['driver']}")
    if "settings" in c:
        words += [
            f"{c['model']} {c['settings']['load_format']} weights {c['dtype']}",
            f"max_model_len {c['max_model_len']}",
            f"{c['max_rows']} rows and {c['token_budget']} tokens a step",
            f"lane {c['lane']} depth {c['depth']}, {c['num_programs']} programs",
        ]
    words += [f"{c['model']}, {c['clients']} client processes"] if "clients" in c else []
    words += [c["work"]] if "work" in c else []
    peers = {
        f" {result['peer']['engine']}: {result['peer']['conditions']}."
        for result in report.get("results", ())
        if result.get("peer")
    }
    return f"Conditions: {'; '.join(words)}.{''.join(sorted(peers))}"


def _peer_name(report: Report) -> str | None:
    names = {result["peer"]["engine"] for result in report["results"] if result["peer"]}
    return ", ".join(sorted(names)) or None


def _number(value: float | None, places: int = 0, suffix: str = "") -> str:
    return _NONE if value is None else f"{value:,.{places}f}{suffix}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Bars = list[tuple[str, list[tuple[str, float]]]]
"""Shape and, for each engine, its share of the bound."""


def shares_of_bound(report: Report) -> Bars:
    """Shares of the roofline bound; empty where the device's ceilings are not known."""
    bars: Bars = []
    for result in report["results"]:
        own, peer, bound = rates(result)
        if bound is None:
            continue
        pairs = [("Treadle", own)] + ([] if peer is None else [(result["peer"]["engine"], peer)])
        bars.append((result["shape"], [(name, rate / bound) for name, rate in pairs]))
    return bars


_COLOURS = ("#1f6feb", "#9aa4b2")
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 130, 480, 14, 14, 46


def chart(report: Report, bars: Bars) -> str:
    """Horizontal bars, one group for each shape."""
    names = list(dict.fromkeys(name for _, pairs in bars for name, _ in pairs))
    colours = dict(zip(names, _COLOURS, strict=False))
    parts: list[str] = []
    y = _TOP
    for shape, pairs in bars:
        parts.append(_text(_LEFT - 8, y + _BAR * len(pairs) / 2 + 4, shape, "end"))
        for name, share in pairs:
            width = _WIDTH * min(share, 1.0)
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colours[name]}"/>'
            )
            parts.append(_text(_LEFT + width + 5, y + _BAR - 4, f"{share:.0%}", "start"))
            y += _BAR
        y += _GAP
    key = [
        f'<rect x="{_LEFT + 150 * i}" y="24" width="10" height="10" fill="{colours[name]}"/>'
        + _text(_LEFT + 150 * i + 15, 33, name, "start")
        for i, name in enumerate(names)
    ]
    title = _text(_LEFT, 15, _title(report), "start")
    size = f'width="{_LEFT + _WIDTH + 60}" height="{y}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        f"{background}{title}{''.join(key)}{''.join(parts)}</svg>\n"
    )


def _title(report: Report) -> str:
    c = report["conditions"]
    return f"{c['model']} on {c['device']}: share of the bound"


def draw(path: pathlib.Path, report: Report, bars: Bars) -> bool:
    """Writes the same chart as PNG; returns False where matplotlib is not installed."""
    try:
        import matplotlib.figure
    except ImportError:
        return False
    names = list(dict.fromkeys(name for _, pairs in bars for name, _ in pairs))
    height = 0.8 / len(names)
    figure = matplotlib.figure.Figure(figsize=(8, 1.2 + 0.55 * len(bars)), layout="constrained")
    axis: Any = figure.subplots()
    for i, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
        places = [row + (i - (len(names) - 1) / 2) * height for row in range(len(bars))]
        shares = [100 * dict(pairs).get(name, 0.0) for _, pairs in bars]
        drawn = axis.barh(places, shares, height, color=colour, label=name)
        axis.bar_label(drawn, [f"{share:.0f}%" if share else "" for share in shares], padding=3)
    axis.set_yticks(range(len(bars)), [shape for shape, _ in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 105)
    axis.set_xlabel("% of the bound")
    axis.set_title(_title(report), fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{saxutils.escape(text)}</text>'


if __name__ == "__main__":
    main()
