"""Renders a conversation into prompt text with the checkpoint's own chat template, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_TEMPLATE_CHARS = 1 << 18
MAX_RENDERED_CHARS = 1 << 24


class ChatTemplate:
    """The chat templates of one checkpoint, compiled.

    Sources come from the model folder or GGUF file only, never from a request.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_rendered_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compiles the templates.

        Args:
          sources: Jinja sources by name: `default`, and perhaps `tool_use`, taken when there are
            tools.
          special_tokens: variables such as `bos_token`.
          max_rendered_chars: rendering stops with an error past this.
        """
        if "default" not in sources:
            raise ValueError(
                "the checkpoint has no chat template; use generate with a prompt, or add "
                "chat_template.jinja to the model folder"
            )
        self._special_tokens = dict(special_tokens or {})
        self._max_rendered_chars = max_rendered_chars
        self._templates = {name: _compiled(name, source) for name, source in sources.items()}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The templates that `tokenizer` found in the checkpoint."""
        return cls(tokenizer.chat_templates, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; encode it with `add_special_tokens=False`.

        Args:
          messages: each with `role` and `content`: text, a list of text parts (joined by
            newlines), or nothing beside an assistant's `tool_calls`. Other fields are passed on.
          tools: descriptions of functions, passed on.
          add_generation_prompt: whether the text ends where the assistant's answer begins.
          variables: more names the template may read, such as `enable_thinking`.

        Raises:
          ValueError: a message is malformed, or the template refused or failed.
        """
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": checked_messages(messages),
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        wants_tools = bool(tools) and "tool_use" in self._templates
        template = self._templates["tool_use" if wants_tools else "default"]
        pieces, num_chars = [], 0
        try:
            for piece in template.generate(names):
                num_chars += len(piece)
                if num_chars > self._max_rendered_chars:
                    break
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error
        except Exception as error:  # whatever an operation on the caller's values raises
            raise ValueError(
                f"the chat template failed with {type(error).__name__}: {error}; "
                "it may not know this role or field"
            ) from error
        if num_chars > self._max_rendered_chars:
            raise ValueError(
                f"the rendered conversation has more than {self._max_rendered_chars} characters; "
                "shorten it"
            )
        return "".join(pieces)


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with text content, as templates expect them; errors name index and field."""
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    return [
        _checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)
    ]


def _checked_message(place: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}.role must be a non-empty string, got {role!r}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [_text_of(f"{place}.content[{i}]", part) for i, part in enumerate(content)]
        content = "\n".join(parts)
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        raise ValueError(
            f"{place}.content must be a string or a list of text parts, "
            f"got {type(content).__name__}"
        )
    return {**message, "content": content}


def _text_of(place: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{place} must be an object, got {type(part).__name__}")
    if part.get("type") != "text":
        raise ValueError(f"{place}.type is {part.get('type')!r}; this engine reads 'text' only")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{place}.text must be a string, got {type(text).__name__}")
    return text


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools must be a list, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{index}] must be an object, got {type(tool).__name__}")
    return [dict(tool) for tool in tools]


class _AnswerMarks(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks answers for training, and renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 (the base class's attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates were trained with: jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _AnswerMarks],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compiled(name: str, source: str) -> jinja2.Template:
    if not isinstance(source, str):
        raise ValueError(f"chat template {name!r} must be text, got {type(source).__name__}")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"chat template {name!r} has {len(source)} characters, the limit is "
            f"{MAX_TEMPLATE_CHARS}; check the checkpoint's files"
        )
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"chat template {name!r} is malformed in line {error.lineno}: {error.message}; "
            "check the checkpoint's files"
        ) from error
