"""Chat templates render as models were trained, and are refused by name when they cannot be."""

import jinja2
import pytest

from engine.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source, messages=USER, **arguments):
    return ChatTemplate({"default": source}).render(messages, **arguments)


def test_smollm2_template_asks_for_an_answer(smollm2):
    text = ChatTemplate.of(smollm2).render([{"role": "system", "content": "Be brief."}, *USER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_smollm2_template_ends_with_the_last_message_when_asked(smollm2):
    text = ChatTemplate.of(smollm2).render(USER, add_generation_prompt=False)
    assert text.endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}x{{ 1 }}{% endgeneration %}y", "x1y"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].content }}{{ bos_token }}", "Hi"),
    ],
)
def test_helpers_that_templates_expect(source, text):
    assert render(source) == text


def test_special_tokens_variables_and_tools_reach_the_template():
    template = ChatTemplate(
        {"default": "plain", "tool_use": "{{ bos_token }}{{ tools[0].name }}{{ style }}"},
        {"bos_token": "<s>"},
    )
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "f"}], variables={"style": "!"}) == "<s>f!"


def test_text_parts_are_joined_and_tool_calls_need_no_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [call]) == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list, got str"),
        ([], "messages is empty"),
        ([*USER, "x"], r"messages\[1\] must be an object, got str"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a non-empty string, got None"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string .* got NoneType"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\] must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\]\.content\[0\]\.type is 'image_url'; this engine reads 'text' only",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"messages\[0\]\.content\[0\]\.text must be a string, got NoneType",
        ),
    ],
)
def test_malformed_message_is_named(messages, message):
    with pytest.raises(ValueError, match=message):
        render("x", messages)


@pytest.mark.parametrize(
    ("tools", "message"),
    [("f", "tools must be a list, got str"), ([1], r"tools\[0\] must be an object, got int")],
)
def test_malformed_tools_are_named(tools, message):
    with pytest.raises(ValueError, match=message):
        render("x", tools=tools)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused .* roles must alternate"),
        ("{{ messages[0].nothing.more }}", "refused the conversation: .*nothing"),
        ("{{ 'a' + none }}", "failed with TypeError"),
        ("{{ ''.__class__.__mro__ }}", "refused .*unsafe"),
        ("{{ messages.append(1) }}", "refused .*unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "failed with OverflowError: Range too big"),
    ],
)
def test_template_that_refuses_or_fails_says_why(source, message):
    with pytest.raises(ValueError, match=message):
        render(source)


def test_rendering_stops_at_the_limit():
    source = (
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="more than 1000 characters; shorten it"):
        ChatTemplate({"default": source}, max_rendered_chars=1000).render(USER)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "the checkpoint has no chat template"),
        ({"default": "a\n{% if %}"}, "'default' is malformed in line 2"),
        ({"default": 5}, "'default' must be text, got int"),
        (
            {"default": "x" * (MAX_TEMPLATE_CHARS + 1)},
            r"has 262145 characters, the limit is 262144",
        ),
    ],
)
def test_template_that_cannot_serve_is_named(sources, message):
    with pytest.raises(ValueError, match=message) as caught:
        ChatTemplate(sources)
    assert not isinstance(caught.value, jinja2.TemplateError)
