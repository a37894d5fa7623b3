"""Chat templates: the text of transformers, and the assistant's part of it."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_data import ChatTemplate, Tokenizer
from ms_data.errors import TokenizerError

from .chats import BRACKETS, CHATML, DATED, FORGETFUL, MARKED, tokenizer_json, write_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "<b>Weather</b> & more, é漢",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"at": "Rome"}}}
PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": " Why? é漢 "},
    {"role": "assistant", "content": "So <b>&</b>.\n"},
    {"role": "user", "content": "And\n\nnow?"},
    {"role": "assistant", "content": "No."},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": "Ask."},
    {"role": "tool", "content": "sunny", "name": None},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "Told."},
]


def their_tokenizer() -> Any:
    """The same tokenizer in transformers."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json().decode()),
        bos_token="<s>",
        eos_token="</s>",
    )


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("messages", [PLAIN, PLAIN[:1], TOOLS], ids=["plain", "prompt", "tools"])
@pytest.mark.parametrize("source", [CHATML, MARKED, FORGETFUL, BRACKETS, DATED])
def test_text_and_tokens_are_those_of_transformers(
    source: str, messages: list[dict[str, Any]], generation: bool
) -> None:
    """Whitespace rules, filters, loop controls, special tokens, tools, thoughts, the date."""
    theirs = their_tokenizer()
    tools = [TOOL] if messages is TOOLS else None
    settings: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
    text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **settings)
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(messages, **settings) == text
    ids = theirs.apply_chat_template(messages, chat_template=source, return_dict=False, **settings)
    assert Tokenizer(tokenizer_json()).encode_chat(text) == list(ids)


@pytest.mark.parametrize("messages", [PLAIN, TOOLS], ids=["plain", "tools"])
def test_marked_tokens_are_those_of_transformers(messages: list[dict[str, Any]]) -> None:
    """{% generation %} gives the mask that `return_assistant_tokens_mask` gives."""
    out = their_tokenizer().apply_chat_template(
        messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    rendered = ChatTemplate(MARKED, special_tokens={"bos_token": "<s>"}).render_for_training(
        messages
    )
    ((ids, learnt),) = Tokenizer(tokenizer_json()).encode_chats([rendered])
    assert ids.tolist() == list(out["input_ids"])
    assert learnt.astype(int).tolist() == out["assistant_masks"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (CHATML, ["So <b>&</b>.\n<|im_end|>", "No.<|im_end|>"]),
        (BRACKETS, [" So <b>&</b>.\n</s>", " No.</s>"]),
        (MARKED, ["So <b>&</b>.<|im_end|>", "No.<|im_end|>"]),
    ],
)
def test_every_answer_is_learnt_with_its_end_and_nothing_else(source: str, said: list[str]) -> None:
    """Multi-turn; by prefixes or marks; down to the tokens."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    rendered = template.render_for_training(PLAIN)
    assert [rendered.text[start:stop] for start, stop in rendered.spans] == said
    tokenizer = Tokenizer(tokenizer_json())
    ((ids, learnt),) = tokenizer.encode_chats([rendered])
    parts = np.split(ids, np.flatnonzero(np.diff(learnt.astype(int))) + 1)
    shown = [tokenizer._model.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    assert shown[1::2] == said


def test_weight_0_and_what_comes_before_first_are_not_learnt() -> None:
    """As OpenAI's form asks for; as a pair's prompt is left out."""
    messages = [PLAIN[0], {**PLAIN[1], "weight": 0}, *PLAIN[2:]]
    for source in (CHATML, MARKED):
        template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
        for rendered in (
            template.render_for_training(messages),
            template.render_for_training(PLAIN, first=3),
        ):
            assert [rendered.text[a:b] for a, b in rendered.spans] == ["No.<|im_end|>"]


def test_an_answer_that_no_prefix_proves_is_refused() -> None:
    """A template that rewrites earlier answers; the last answer alone can be learnt."""
    thoughtful = [PLAIN[0], {"role": "assistant", "content": "Hm.</think>So."}, *PLAIN[2:]]
    template = ChatTemplate(FORGETFUL)
    with pytest.raises(
        ValueError, match=r"cannot locate the assistant's part.*mark the assistant's part"
    ):
        template.render_for_training(thoughtful)
    assert template.render_for_training(thoughtful[:2]).spans
    assert template.render_for_training(PLAIN).spans


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {% endfor %}",
            "no assistant text.*nothing to train on",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}",
            "no assistant text.*nothing to train on",
        ),
        (
            "{% for m in messages %}{% set x %}{% generation %} {{ m.content }}{% endgeneration %}"
            "{% endset %}{{ x | trim }}{% endfor %}",
            "modifies text marked",
        ),
        ("{{ raise_exception('not you') }}", "rejects the messages: not you"),
        ("{{ messages[9].content }}", "rejects the messages"),
        ("{{ 1 / 0 }}", "rejects the messages: division by zero"),
        ("{{ 10.0 ** 400 }}", "rejects the messages"),
        ("{{ messages[0].content | attr(3) }}", "rejects the messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects the messages"),
        ("{{ messages.append(1) }}", "rejects the messages"),
        ("{{ ''.__class__.__mro__ }}", "rejects the messages"),
    ],
)
def test_a_template_that_teaches_nothing_or_breaks_out_is_refused(source: str, says: str) -> None:
    """No assistant text, marks that move, its own refusal, a missing name, the sandbox's walls."""
    with pytest.raises(ValueError, match=says):
        ChatTemplate(source).render_for_training(PLAIN)


def test_templates_are_found_where_tokenizers_keep_them(tmp_path: Path) -> None:
    """In tokenizer_config.json, named or not, or in chat_template.jinja, which comes first."""
    folder = write_tokenizer(tmp_path / "model", MARKED)
    assert ChatTemplate.load(folder).source == MARKED
    assert ChatTemplate.load(folder).render(PLAIN).startswith("<s><|im_start|>user")
    (folder / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate.load(folder).source == CHATML
    named = (
        '{"chat_template": [{"name": "default", "template": "a"}, {"name": "b", "template": ""}]}'
    )
    (tmp_path / "tokenizer_config.json").write_text(named)
    assert ChatTemplate.load(tmp_path).source == "a"
    assert ChatTemplate.load(tmp_path, name="b").source == ""
    with pytest.raises(
        TokenizerError, match="no template is named 'c'; the templates are: default, b"
    ):
        ChatTemplate.load(tmp_path, name="c")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="not a valid chat template"):
        ChatTemplate.load(tmp_path / "broken.jinja")


A, B, C = "A{{ messages[0].content }}", "B", "C"
NAMED = [{"name": "default", "template": A}, {"name": "rag", "template": B}]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": A},
        {"chat_template.jinja": A, "additional_chat_templates/rag.jinja": B},
        {"additional_chat_templates/default.jinja": A, "additional_chat_templates/rag.jinja": B},
        {"tokenizer_config.json": {"chat_template": A}},
        {"tokenizer_config.json": {"chat_template": NAMED}},
        {"tokenizer_config.json": {"chat_template": C}, "chat_template.jinja": A},
        {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": A},
        {
            "tokenizer_config.json": {"chat_template": C},
            "additional_chat_templates/default.jinja": A,
        },
    ],
)
def test_templates_are_chosen_as_transformers_chooses_them(
    files: dict[str, Any], tmp_path: Path
) -> None:
    """By name, out of every file that may hold one; compare with AutoTokenizer."""
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "model", C)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    contents = {"tokenizer_config.json": {}, **files}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        is_text = isinstance(content, str)
        (folder / name).write_text(content if is_text else json.dumps(settings | content))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ChatTemplate.load(folder).source == theirs.get_chat_template() == A
    for name in ("rag", "default"):
        if isinstance(theirs.chat_template, dict):
            assert ChatTemplate.load(folder, name=name).source == theirs.chat_template[name]
        elif name == "rag":
            with pytest.raises(TokenizerError, match="no template is named 'rag'"):
                ChatTemplate.load(folder, name=name)


def test_the_template_of_a_processor_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    """chat_template.json, which processors wrote before there was chat_template.jinja."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": A}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.load(tmp_path).source == A
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": B}))
    assert ChatTemplate.load(tmp_path).source == B


@pytest.mark.parametrize("value", [3, {"default": 3}, ["x"], [{"name": "default"}]])
def test_a_template_of_another_shape_is_refused_with_its_file(tmp_path: Path, value: Any) -> None:
    """Text, or a list of names and templates."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TokenizerError, match="chat_template must be a string or a list"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate.load(tmp_path).source == CHATML


def test_a_chosen_date_is_told_and_is_part_of_the_digest() -> None:
    """So that a build can be repeated another day."""
    template = ChatTemplate(DATED, today=date(2026, 1, 31))
    assert template.render(PLAIN).startswith("31 January 2026 ")
    assert template.digest != ChatTemplate(DATED, today=date(2026, 2, 1)).digest
