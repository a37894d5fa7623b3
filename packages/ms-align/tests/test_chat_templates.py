"""Untrusted chat templates: rendered as in transformers, within limits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ms_align.chat.template import render_chat
from ms_align.errors import ConfigError, DataError
from ms_align.tokenizer import load_tokenizer

from .instruction_sets import TEMPLATE, byte_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " copy red <0>\n"},
    {"role": "assistant", "content": "  the word is "},
]
WELL_BEHAVED = {
    "plain": TEMPLATE,
    "trimming": TEMPLATE.replace("m.content", "m['content'] | trim"),
    "special tokens": "{{ eos_token }}" + TEMPLATE,
    "as JSON": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "absent names": TEMPLATE + "{{ tools }}{{ documents }}{% if nothing is defined %}!{% endif %}",
}
_NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
HOSTILE = {
    "nested ranges": (
        _NESTED.replace("BODY", _NESTED.replace("BODY", "")),
        "exceeds the CPU time limit",
    ),
    "power at compile time": (
        "{{ 10 ** (10 ** 9) % 7 }}",
        "exceeds the CPU time limit|not a valid",
    ),
    "wide format": ("{{ '%2000000000d' % 1 }}", "too much memory"),
    "JSON indent": ("{{ messages | tojson(indent=10**9) }}", "too much memory"),
    "long text": ("{{ 'a' * 30000000 }}", "too much text|exceeds the CPU time limit"),
    "growing text": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'a' * 99999 }}"
        "{% endfor %}{% endfor %}",
        "too much text",
    ),
    "break outside a loop": ("{% break %}", "not a valid chat template: 'break' outside loop"),
    "infinity": ("{{ 1e999 | round | int }}", "rejects the messages"),
    "no file": ("{% include 'x' %}", "rejects the messages: no loader"),
    "half a character": ("{{ '\\ud800' }}", "half a character"),
    "endless source": (" " * (1 << 20) + TEMPLATE, "exceeds 1 MiB"),
}


def write_tokenizer_folder(template: str, folder: Path) -> Path:
    """Write a tokenizer folder with this template."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def hf_tokenizer(template: str, folder: Path) -> Any:
    """Open such a folder with transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_tokenizer_folder(template, folder))


@pytest.mark.parametrize("name", WELL_BEHAVED)
def test_a_chat_is_rendered_as_in_transformers(name: str, tmp_path: Path) -> None:
    """With a generation prompt, and with the last message continued."""
    tokenizer = hf_tokenizer(WELL_BEHAVED[name], tmp_path)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert render_chat(tokenizer, CHAT) == expected
    if name == "as JSON":  # neither reads `content` by name
        return
    continued = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert render_chat(tokenizer, CHAT, continue_last=True) == continued


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    """As transformers does without tools; without a default the chat is rejected."""
    tokenizer = hf_tokenizer(TEMPLATE, tmp_path)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "tools"}
    assert render_chat(tokenizer, CHAT).startswith("<system>Be brief. ")
    tokenizer.chat_template = {"tool_use": "tools"}
    with pytest.raises(DataError, match="no chat template"):
        render_chat(tokenizer, CHAT)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_runaway_template_is_stopped_with_one_line(name: str, tmp_path: Path) -> None:
    """Each hits its own limit, on machines of any speed; the next chat is rendered."""
    source, message = HOSTILE[name]
    tokenizer = hf_tokenizer(TEMPLATE, tmp_path)
    tokenizer.chat_template = source
    with pytest.raises(DataError, match=message) as caught:
        render_chat(tokenizer, CHAT)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    tokenizer.chat_template = TEMPLATE
    assert render_chat(tokenizer, CHAT).endswith("<assistant>")


@pytest.mark.parametrize("last", [None, 7, ["the word"]])
def test_a_message_without_text_cannot_be_continued(last: object, tmp_path: Path) -> None:
    """A message that the template rewrites cannot be continued either."""
    tokenizer = hf_tokenizer(TEMPLATE, tmp_path)
    with pytest.raises(DataError, match="must have a text to continue"):
        render_chat(tokenizer, [{"role": "assistant", "content": last}], continue_last=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(DataError, match="must print the last message unchanged"):
        render_chat(tokenizer, CHAT, continue_last=True)


def test_prompts_are_rendered_under_limits_without_ms_data(tmp_path: Path) -> None:
    """A new process without sibling packages reads a hostile tokenizer folder."""
    write_tokenizer_folder(TEMPLATE, tmp_path / "sound")
    write_tokenizer_folder(HOSTILE["wide format"][0], tmp_path / "hostile")
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['ms_data', 'ms_parallel', 'ms_compress']))\n"
        "from ms_align.rollouts.prompts import read_prompts\n"
        "from ms_align.tokenizer import load_tokenizer\n"
        "chat = [[{'role': 'user', 'content': 'copy red'}]]\n"
        "for name in ('sound', 'hostile'):\n"
        "    tokenizer = load_tokenizer(name)\n"
        "    try: print(tokenizer.decode(read_prompts(chat, tokenizer)[0].tokens))\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    rendered, hostile = result.stdout.splitlines()
    assert rendered == "<user>copy red<assistant>"
    assert hostile.startswith("DataError ")
    assert "takes too much memory, so it was stopped" in hostile


def test_a_chat_without_jinja2_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If transformers is installed without jinja2."""
    from ms_align.chat import process

    tokenizer = load_tokenizer(write_tokenizer_folder(TEMPLATE, tmp_path))
    process._PROCESS.close()
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ms-align\[hf\]'"):
        tokenizer.encode_messages(CHAT)  # type: ignore[attr-defined]
