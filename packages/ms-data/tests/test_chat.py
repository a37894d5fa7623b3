"""Chat templates render like transformers, and locate the assistant's text."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_data import ChatTemplate, Tokenizer
from ms_data.errors import TokenizerError

from .chat_templates import (
    CHATML,
    DATED_TEMPLATE,
    DROPS_OLD_THINKING,
    GENERATION_MARKS,
    INST_TEMPLATE,
    tokenizer_json,
    write_tokenizer,
)

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


def hf_tokenizer() -> Any:
    """Return the test tokenizer as a transformers class."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json().decode()),
        bos_token="<s>",
        eos_token="</s>",
    )


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("messages", [PLAIN, PLAIN[:1], TOOLS], ids=["plain", "prompt", "tools"])
@pytest.mark.parametrize(
    "source", [CHATML, GENERATION_MARKS, DROPS_OLD_THINKING, INST_TEMPLATE, DATED_TEMPLATE]
)
def test_text_and_tokens_match_transformers(
    source: str, messages: list[dict[str, Any]], generation: bool
) -> None:
    """Covers whitespace, filters, loop controls, special tokens, tools, reasoning and dates."""
    reference = hf_tokenizer()
    tools = [TOOL] if messages is TOOLS else None
    settings: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
    text = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **settings)
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(messages, **settings) == text
    ids = reference.apply_chat_template(
        messages, chat_template=source, return_dict=False, **settings
    )
    assert Tokenizer(tokenizer_json()).encode_chat(text) == list(ids)


@pytest.mark.parametrize("messages", [PLAIN, TOOLS], ids=["plain", "tools"])
def test_generation_tags_give_the_assistant_mask_of_transformers(
    messages: list[dict[str, Any]],
) -> None:
    expected = hf_tokenizer().apply_chat_template(
        messages,
        chat_template=GENERATION_MARKS,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    rendered = ChatTemplate(
        GENERATION_MARKS, special_tokens={"bos_token": "<s>"}
    ).render_for_training(messages)
    ((ids, loss_mask),) = Tokenizer(tokenizer_json()).encode_chats([rendered])
    assert ids.tolist() == list(expected["input_ids"])
    assert loss_mask.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (CHATML, ["So <b>&</b>.\n<|im_end|>", "No.<|im_end|>"]),
        (INST_TEMPLATE, [" So <b>&</b>.\n</s>", " No.</s>"]),
        (GENERATION_MARKS, ["So <b>&</b>.<|im_end|>", "No.<|im_end|>"]),
    ],
)
def test_only_answers_with_their_end_tokens_are_targets(source: str, answers: list[str]) -> None:
    """Multi-turn, located by prefixes or generation tags, down to the tokens."""
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    rendered = template.render_for_training(PLAIN)
    assert [rendered.text[start:stop] for start, stop in rendered.spans] == answers
    tokenizer = Tokenizer(tokenizer_json())
    ((ids, loss_mask),) = tokenizer.encode_chats([rendered])
    parts = np.split(ids, np.flatnonzero(np.diff(loss_mask.astype(int))) + 1)
    decoded = [tokenizer._model.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    assert decoded[1::2] == answers


def test_answers_with_weight_0_or_before_first_are_not_targets() -> None:
    """OpenAI's `weight` key, and the prompt of a preference pair."""
    messages = [PLAIN[0], {**PLAIN[1], "weight": 0}, *PLAIN[2:]]
    for source in (CHATML, GENERATION_MARKS):
        template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
        for rendered in (
            template.render_for_training(messages),
            template.render_for_training(PLAIN, first=3),
        ):
            assert [rendered.text[a:b] for a, b in rendered.spans] == ["No.<|im_end|>"]


def test_templates_that_rewrite_earlier_answers_are_refused() -> None:
    """The last answer alone can still be trained on."""
    messages = [PLAIN[0], {"role": "assistant", "content": "Hm.</think>So."}, *PLAIN[2:]]
    template = ChatTemplate(DROPS_OLD_THINKING)
    with pytest.raises(
        ValueError, match=r"cannot locate the assistant's part.*mark the assistant's part"
    ):
        template.render_for_training(messages)
    assert template.render_for_training(messages[:2]).spans
    assert template.render_for_training(PLAIN).spans


@pytest.mark.parametrize(
    ("source", "message"),
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
def test_templates_without_assistant_text_or_with_errors_are_refused(
    source: str, message: str
) -> None:
    """No assistant text, moved tags, its own exception, missing names, sandbox violations."""
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render_for_training(PLAIN)


def test_templates_are_loaded_from_tokenizer_folders(tmp_path: Path) -> None:
    """From tokenizer_config.json, named or not, or chat_template.jinja, which takes precedence."""
    folder = write_tokenizer(tmp_path / "model", GENERATION_MARKS)
    assert ChatTemplate.load(folder).source == GENERATION_MARKS
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
def test_template_files_have_the_precedence_of_transformers(
    files: dict[str, Any], tmp_path: Path
) -> None:
    """By name, from every file that may hold one; compared with AutoTokenizer."""
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "model", C)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    contents = {"tokenizer_config.json": {}, **files}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        is_text = isinstance(content, str)
        (folder / name).write_text(content if is_text else json.dumps(settings | content))
    reference = AutoTokenizer.from_pretrained(folder)
    assert ChatTemplate.load(folder).source == reference.get_chat_template() == A
    for name in ("rag", "default"):
        if isinstance(reference.chat_template, dict):
            assert ChatTemplate.load(folder, name=name).source == reference.chat_template[name]
        elif name == "rag":
            with pytest.raises(TokenizerError, match="no template is named 'rag'"):
                ChatTemplate.load(folder, name=name)


def test_chat_template_json_is_the_last_resort(tmp_path: Path) -> None:
    """Processors wrote chat_template.json before chat_template.jinja existed."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": A}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.load(tmp_path).source == A
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": B}))
    assert ChatTemplate.load(tmp_path).source == B


@pytest.mark.parametrize("value", [3, {"default": 3}, ["x"], [{"name": "default"}]])
def test_malformed_chat_template_entries_are_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TokenizerError, match="chat_template must be a string or a list"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate.load(tmp_path).source == CHATML


def test_a_fixed_date_is_rendered_and_part_of_the_digest() -> None:
    """A build can be repeated on another day."""
    template = ChatTemplate(DATED_TEMPLATE, today=date(2026, 1, 31))
    assert template.render(PLAIN).startswith("31 January 2026 ")
    assert template.digest != ChatTemplate(DATED_TEMPLATE, today=date(2026, 2, 1)).digest
