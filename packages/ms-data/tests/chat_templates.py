"""Chat templates, a tokenizer and rows shared by several tests."""

import json
from pathlib import Path
from typing import Any

import tokenizers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Rendering prefixes locates the assistant's turns."""

GENERATION_MARKS = """{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=2) }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {%- if message.reasoning_content is defined %}
                {{- '(' + message.reasoning_content + ')' }}
            {%- endif %}
            {%- for call in message.tool_calls or [] %}
                {{- call.function.name + call.function.arguments | tojson }}
            {%- endfor %}
            {{- message.content | trim }}<|im_end|>
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif loop.first and message.role not in ['system', 'user'] %}
        {{- raise_exception('begin with the user, not with ' + message.role) }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""Has generation tags, prints tools and reasoning, and rejects unknown roles."""

DROPS_OLD_THINKING = """{%- set last = namespace(at=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.at = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 < last.at %}
        {%- set text = message.content.split('</think>')[-1] %}
    {%- else %}
        {%- set text = message.content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Drops the reasoning of all answers except the last, so prefixes do not render consistently."""

INST_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if loop.index0 == 1 and messages[0].role == 'system' %}{% continue %}{% endif %}
{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% endif %}
{% if message.role == 'assistant' %} {{ message.content }}{{ eos_token }}{% endif %}
{% endfor %}"""
"""No generation prompt; depends on loop controls and block trimming."""

DATED_TEMPLATE = "{{ strftime_now('%d %B %Y') }} " + CHATML

ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}." * (1 + n % 5)},
        ]
    }
    for n in range(300)
]


def tokenizer_json() -> bytes:
    """Train a byte-level BPE with the special tokens of the templates above."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([json.dumps(row) for row in ROWS], trainer)
    return model.to_str().encode()


def write_tokenizer(folder: Path, template: str = CHATML) -> Path:
    """Write a tokenizer folder like those published with models."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    config = {
        "chat_template": template,
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
