"""What a row says is learned as it is meant, or the row is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from ms_data import ChatTemplate, build, read_conversation
from ms_data.cli import main

from .chats import CHATML, MARKED, write_rows, write_tokenizer

USER = {"role": "user", "content": "Weather in Rome?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}<end>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
AS_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Takes arguments for text, as DeepSeek V3 does."""
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}|{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def call(arguments: Any) -> dict[str, Any]:
    """An assistant's call of a tool."""
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def parts(*texts: str) -> list[dict[str, str]]:
    """A content of text parts."""
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("source", "messages", "missing"),
    [
        (CHATML, [USER, call({"city": "Rome"})], r"tool_calls\[0\]"),
        (CHATML, [USER, {**ANSWER, "reasoning_content": "Ask."}], "reasoning_content"),
        (CHATML, [{**USER, "name": "ann-b"}, ANSWER], r"messages\[0\]\.name"),
        (
            NO_SYSTEM,
            [{"role": "system", "content": "Be brief and kind."}, USER, ANSWER],
            r"messages\[0\]\.content",
        ),
        (MARKED, [USER, {**ANSWER, "content": ""} | call({"a": 1}), USER, ANSWER], "never"),
    ],
    ids=["call", "thoughts", "name", "system", "printed"],
)
def test_what_is_not_printed_is_refused(
    source: str, messages: list[dict[str, Any]], missing: str
) -> None:
    """Names the place in the row; what is printed passes."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    if missing == "never":
        assert template.render_for_training(messages).spans
        return
    with pytest.raises(ValueError, match=missing):
        template.render_for_training(messages)


def test_tools_that_are_not_printed_are_refused() -> None:
    """A model cannot learn to call what it is not shown."""
    tool = {"type": "function", "function": {"name": "weather", "description": "Of a city."}}
    with pytest.raises(ValueError, match=r"tools\[0\]\.description is not printed"):
        ChatTemplate(CHATML).render_for_training([USER, ANSWER], tools=[tool])
    template = ChatTemplate(MARKED, special_tokens={"bos_token": "<s>"})
    assert "Of a city." in template.render_for_training([USER, ANSWER], tools=[tool]).text


def test_thoughts_of_turns_that_are_not_trained_on_may_be_left_out() -> None:
    """Templates print them for the newest answer alone, as the model is used."""
    earlier = {**ANSWER, "reasoning_content": "Ask.", "weight": 0}
    assert ChatTemplate(CHATML).render_for_training([USER, earlier, USER, ANSWER]).spans


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
@pytest.mark.parametrize(
    ("source", "said"),
    [(MARKED, 'weather{"city": "Rome"}'), (AS_TEXT, '[weather{"city": "Rome"}]')],
)
def test_arguments_reach_a_template_in_the_form_that_it_takes(
    source: str, said: str, arguments: Any
) -> None:
    """As an object or as JSON, however the row gives them."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert said in template.render_for_training([USER, call(arguments)]).text
    with pytest.raises(ValueError, match="string but not JSON"):
        template.render_for_training([USER, call("{city")])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (CHATML, "assistant\none\ntwo<"),
        (CHATML.replace("message['content']", "(message.content | string)"), "\none\ntwo<"),
        (PARTS, "<assistant>one|two|<end>"),
    ],
    ids=["text", "python", "parts"],
)
def test_text_parts_are_printed_as_text(source: str, said: str) -> None:
    """A template that knows parts gets them; others get one text."""
    messages = [{"role": "user", "content": parts("ask", "me")}]
    answer = {"role": "assistant", "content": parts("one", "two")}
    assert said in ChatTemplate(source).render_for_training([*messages, answer]).text


@pytest.mark.parametrize(
    ("row", "says"),
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
def test_rows_with_content_in_other_places_are_refused(row: dict[str, Any], says: str) -> None:
    """It would be left out."""
    with pytest.raises(ValueError, match=says):
        read_conversation(row)


def test_a_system_key_is_the_first_message() -> None:
    """Also of rows in OpenAI's form."""
    read = read_conversation({"messages": [USER, ANSWER], "system": "Be kind."})
    assert read.messages[0] == {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("template", "ended"),
    [
        (CHATML, 3),
        (CHATML.replace("<|im_end|>", ""), 0),
        (CHATML.replace("<|im_end|>", "### end"), 0),
    ],
    ids=["ends", "nothing", "text"],
)
def test_answers_that_never_end_are_told(
    template: str, ended: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that never sees an end does not stop."""
    model = write_tokenizer(tmp_path / "model", template)
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}] * 3)
    out = tmp_path / "out"
    command = ["build", str(rows), "--tokenizer", str(model), "--chat", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert (facts["answers"]["answers"], facts["answers"]["ended"]) == (3, ended)
    assert bool(facts["warnings"]) == (ended == 0)
    assert ("none of 3 answers ends" in said.err) == (ended == 0)
    again = build(rows, tokenizer=model, chat=model, out=out)
    assert again.built_before
    assert list(again.warnings) == facts["warnings"]
