"""Every part of a row is rendered by the template, or the row is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from ms_data import ChatTemplate, build, read_conversation
from ms_data.cli import main

from .chat_templates import CHATML, GENERATION_MARKS, write_rows, write_tokenizer

USER = {"role": "user", "content": "Weather in Rome?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}<end>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRING_ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Expects arguments as a string, like DeepSeek V3."""
TEXT_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}|{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tool_call(arguments: Any) -> dict[str, Any]:
    """Return an assistant message with a tool call."""
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def text_parts(*texts: str) -> list[dict[str, str]]:
    """Return message content made of text parts."""
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("source", "messages", "missing"),
    [
        (CHATML, [USER, tool_call({"city": "Rome"})], r"tool_calls\[0\]"),
        (CHATML, [USER, {**ANSWER, "reasoning_content": "Ask."}], "reasoning_content"),
        (CHATML, [{**USER, "name": "ann-b"}, ANSWER], r"messages\[0\]\.name"),
        (
            NO_SYSTEM,
            [{"role": "system", "content": "Be brief and kind."}, USER, ANSWER],
            r"messages\[0\]\.content",
        ),
        (
            GENERATION_MARKS,
            [USER, {**ANSWER, "content": ""} | tool_call({"a": 1}), USER, ANSWER],
            "never",
        ),
    ],
    ids=["call", "thoughts", "name", "system", "printed"],
)
def test_parts_the_template_does_not_print_are_refused(
    source: str, messages: list[dict[str, Any]], missing: str
) -> None:
    """The error names the location in the row; printed parts pass."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    if missing == "never":
        assert template.render_for_training(messages).spans
        return
    with pytest.raises(ValueError, match=missing):
        template.render_for_training(messages)


def test_tools_that_are_not_printed_are_refused() -> None:
    """A model cannot learn to call tools that the prompt does not show."""
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city."}}
    with pytest.raises(ValueError, match=r"tools\[0\]\.description is not printed"):
        ChatTemplate(CHATML).render_for_training([USER, ANSWER], tools=[tool])
    template = ChatTemplate(GENERATION_MARKS, special_tokens={"bos_token": "<s>"})
    assert "Of a city." in template.render_for_training([USER, ANSWER], tools=[tool]).text


def test_reasoning_of_untrained_turns_may_be_dropped() -> None:
    """Templates print reasoning only for the last answer, as at inference."""
    earlier = {**ANSWER, "reasoning_content": "Ask.", "weight": 0}
    assert ChatTemplate(CHATML).render_for_training([USER, earlier, USER, ANSWER]).spans


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (GENERATION_MARKS, 'weather{"city": "Rome"}'),
        (STRING_ARGUMENTS, '[weather{"city": "Rome"}]'),
    ],
)
def test_tool_arguments_are_passed_in_the_form_the_template_expects(
    source: str, expected: str, arguments: Any
) -> None:
    """As an object or as JSON, independent of the form in the row."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert expected in template.render_for_training([USER, tool_call(arguments)]).text
    with pytest.raises(ValueError, match="string but not JSON"):
        template.render_for_training([USER, tool_call("{city")])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "assistant\none\ntwo<"),
        (CHATML.replace("message['content']", "(message.content | string)"), "\none\ntwo<"),
        (TEXT_PARTS, "<assistant>one|two|<end>"),
    ],
    ids=["text", "python", "parts"],
)
def test_text_parts_are_printed_as_text(source: str, expected: str) -> None:
    """Templates that support parts get them; others get one string."""
    messages = [{"role": "user", "content": text_parts("ask", "me")}]
    answer = {"role": "assistant", "content": text_parts("one", "two")}
    assert expected in ChatTemplate(source).render_for_training([*messages, answer]).text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "`images`, which is not supported"),
        ({"messages": [USER, ANSWER], "functions": [{}]}, "`functions`, which is not supported"),
        ({"messages": [USER, {"role": "tool", "content": None}, ANSWER]}, "without content"),
        (
            {"messages": [{"role": "system", "content": "a"}, USER, ANSWER], "system": "b"},
            "remove either",
        ),
    ],
)
def test_rows_with_content_in_unsupported_keys_are_refused(
    row: dict[str, Any], message: str
) -> None:
    """It would be lost silently."""
    with pytest.raises(ValueError, match=message):
        read_conversation(row)


def test_a_system_key_is_the_first_message() -> None:
    """Also for rows in OpenAI's format."""
    conversation = read_conversation({"messages": [USER, ANSWER], "system": "Be kind."})
    assert conversation.messages[0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("template", "ended"),
    [
        (CHATML, 3),
        (CHATML.replace("<|im_end|>", ""), 0),
        (CHATML.replace("<|im_end|>", "### end"), 0),
    ],
    ids=["ends", "nothing", "text"],
)
def test_answers_without_an_end_token_give_a_warning(
    template: str, ended: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that never sees an end token does not stop."""
    model = write_tokenizer(tmp_path / "model", template)
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}] * 3)
    out = tmp_path / "out"
    command = ["build", str(rows), "--tokenizer", str(model), "--chat", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["answers"]["answers"], summary["answers"]["ended"]) == (3, ended)
    assert bool(summary["warnings"]) == (ended == 0)
    assert ("none of 3 answers ends" in captured.err) == (ended == 0)
    rebuilt = build(rows, tokenizer=model, chat=model, out=out)
    assert rebuilt.built_before
    assert list(rebuilt.warnings) == summary["warnings"]
