"""The `treadle` command: parses arguments, runs one module per command, words every error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from engine.serving.commands import (
    batch,
    bench,
    bench_serve,
    chat,
    check,
    demo,
    gateway,
    options,
    serve,
    top,
    tune,
)

_EPILOG = (
    "Start with `treadle demo`: it answers a question with a small model on a CPU. "
    "Every command explains itself: `treadle generate --help`."
)

_BENCH_SERVE = "bench serve"
"""One command of two words: a group could not take `treadle bench MODEL` beside it."""

_OUR_FAULT = 1
_BAD_INPUT = 2
_INTERRUPTED = 130

app = typer.Typer(
    name="treadle",
    help="Serves large language models from JAX: one compiled step after another.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("generate")(batch.generate)
app.command("chat")(chat.chat)
app.command("score")(batch.score)
app.command("serve")(serve.serve)
app.command("top")(top.top)
app.command("gateway", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    gateway.gateway
)
app.command("bench")(bench.bench)
app.command(_BENCH_SERVE)(bench_serve.bench_serve)
app.command("check")(check.check)
app.command("tune")(tune.tune)


@app.callback()
def _root(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 it failed, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Accepted at any place, because it is added to a line that has just failed.
    debug = "--debug" in words
    raise SystemExit(_run([word for word in words if word != "--debug"], debug))


def _run(words: list[str], debug: bool) -> int:
    if " ".join(words[:2]) == _BENCH_SERVE:
        words = [_BENCH_SERVE, *words[2:]]
    try:
        code = app(words, prog_name="treadle", standalone_mode=False)
    except BrokenPipeError:
        # The reader of a pipe has seen enough; nothing of Python's own exit may write to it again.
        sys.stdout = None
        return _OUR_FAULT
    except typer.exceptions.TyperException as error:
        # Help that stands in for missing words is printed by then and has no message.
        message = error.format_message()
        context = getattr(error, "ctx", None)
        path = "treadle" if context is None else context.command_path
        return _report(f"{message} (see: {path} --help)", _BAD_INPUT) if message else _BAD_INPUT
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(*_worded(error))
    if code == _INTERRUPTED:  # typer's code for Ctrl-C
        return _report("interrupted", code)
    return code if isinstance(code, int) else 0


def _worded(error: Exception) -> tuple[str, int]:
    text = _one_line(error)
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return f"{error.strerror}: {error.filename}" if error.filename else text, _BAD_INPUT
    if isinstance(error, ValueError | TypeError):
        return text, _BAD_INPUT
    if isinstance(error, NotImplementedError | RuntimeError | OSError | MemoryError):
        return text, _OUR_FAULT
    return f"{type(error).__name__}: {text} (--debug shows where)", _OUR_FAULT


def _one_line(error: Exception) -> str:
    lines = [" ".join(line.split()) for line in options.worded(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    more = len(lines) - 1
    return lines[0] + (f" (and {more} more lines; --debug shows all)" if more else "")


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code


if __name__ == "__main__":
    main()
