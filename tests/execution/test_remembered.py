"""A figure is asked for once per code, jax and question; what was half written is asked again."""

import jax
import pytest

from engine.execution import remembered


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def ask():
    """ask(about) -> (figure, whether it had to be made)."""

    def ask(about, value: int = 7):
        made = []
        found = remembered.figure("bytes", about, lambda: made.append(1) or value)
        return found, bool(made)

    return ask


def test_figure_is_made_once(folder, ask):
    assert ask(("a", 1)) == (7, True)
    assert ask(("a", 1), 8) == (7, False)
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def test_another_question_has_another_figure(folder, ask):
    ask(("a", 1))
    assert ask(("a", 2), 8) == (8, True)
    assert ask(("a", 1), 9) == (7, False)


def test_changed_code_forgets(folder, ask, monkeypatch):
    ask("a")
    read = remembered.pathlib.Path.read_bytes
    monkeypatch.setattr(
        remembered.pathlib.Path,
        "read_bytes",
        lambda file: read(file) + b"#" * (file.name == "layers.py"),
    )
    monkeypatch.setattr(remembered, "CODE", remembered.sources())  # as in another process
    assert ask("a", 8) == (8, True)


@pytest.mark.parametrize("content", ["", '{"byt', "{}", "[]", '{"bytes": null}'])
def test_half_a_file_is_made_again(folder, ask, content):
    ask("a")
    (file,) = folder.iterdir()
    file.write_text(content)
    assert ask("a", 8) == (8, True)
    assert ask("a", 9) == (8, False)


def test_without_a_cache_nothing_is_kept(ask):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert ask("a") == (7, True) and ask("a", 8) == (8, True)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
