"""Packs a model's tokenizer files into one archive that a gateway elsewhere loads."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from engine.text.tokenizer import Tokenizer
from models.gguf import config_from_gguf

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""What is taken of a model folder, where it is there."""

# Archives of equal files are equal, so that replicas show one fingerprint.
_DATE = (1980, 1, 1, 0, 0, 0)


def tokenizer_bundle(path: str | Path, tokenizer: Tokenizer) -> bytes:
    """A zip with tokenizer.json, tokenizer_config.json, config.json and what else there is.

    Of a GGUF file, whose metadata says the same, the three are made.

    Args:
      path: the model: a folder, a .gguf file or a config.json.
      tokenizer: loaded from it.

    Raises:
      OSError, ValueError: a file cannot be read.
    """
    folder = tokenizer_folder(path)
    files = [] if folder is None else [folder / name for name in FILES]
    found = {file.name: file.read_bytes() for file in files if file.is_file()}
    made = {
        "tokenizer.json": tokenizer.to_json,
        "tokenizer_config.json": lambda: json.dumps(_tokenizer_config(tokenizer)),
        "config.json": lambda: json.dumps(model_config(path)),
    }
    for name, make in made.items():
        if name not in found:
            found[name] = make().encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name in sorted(found):
            bundle.writestr(zipfile.ZipInfo(name, _DATE), found[name], zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def tokenizer_folder(path: str | Path) -> Path | None:
    """The folder whose tokenizer.json the model uses; None for a GGUF file."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    is_beside = path.suffix != ".gguf" and (folder / "tokenizer.json").is_file()
    return folder if is_beside else None


def model_config(path: str | Path) -> dict[str, Any]:
    """The model's config.json, or what a GGUF file says under the same keys.

    Raises:
      OSError, ValueError: it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        gguf_files = sorted(path.glob("*.gguf"))
        is_gguf = not (path / "config.json").is_file() and len(gguf_files) == 1
        path = gguf_files[0] if is_gguf else path / "config.json"
    if path.suffix == ".gguf":
        return config_from_gguf(path)
    return json.loads(path.read_text(encoding="utf-8"))


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Special tokens and chat templates as tokenizer_config.json writes them."""
    templates = tokenizer.chat_templates
    config: dict[str, Any] = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return config
