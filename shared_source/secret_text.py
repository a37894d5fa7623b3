"""Masking of secrets in text and command lines before they are printed or stored.

A secret is recognized by its name (`--api-key X`, `HF_TOKEN=X`, `"password": "X"`), its position
(user and password in a URL, Authorization header) or its format (`hf_...`, `sk-...`).
"""

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"
LAST_WORDS: Final = frozenset(
    {"key", "keys", "token", "tokens", "auth", "authorization", "pat", "sig", "signature"}
)
"""Words that mark a secret at the end of a name: `api-key`, but not `num-key-value-heads`."""
ANY_WORDS: Final = frozenset(
    {"apikey", "password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets",
     "credential", "credentials"}
)  # fmt: skip
"""Words that mark a secret anywhere in a name."""
COUNTS: Final = frozenset({"max", "min", "num", "n", "new", "total", "batch", "number"})
"""Words that mark a name ending in `tokens` or `keys` as a count: `max-new-tokens`."""
ROLES: Final = frozenset(
    {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image", "end", "stop", "begin"}
)
"""Words that mark a name ending in `token` as a tokenizer's: `eos_token`."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_OPTION: Final = re.compile(r"[-+~]{0,2}[A-Za-z][\w.\-/]*")
_USER: Final = re.compile(r"(?<=://)[^/?#@\s'\"]+(?=@)")
_PARAMETER: Final = re.compile(r"(?P<name>(?<=[?&;])[^=&;?#\s]+)=[^&;#\s'\")]*")
_SETTING: Final = re.compile(
    r"""(?<![\w\-.?&;])(?P<name>[A-Za-z][\w\-.]*)=(?:"[^"]*"|'[^']*'|[^\s,;)&]+)"""
)
# JSON, a dictionary or a header: `"api_key": "X"`, `api-key: X`.
_MEMBER: Final = re.compile(
    r"""(?P<quote>["']?)(?<![\w\-])(?P<name>[A-Za-z][\w\-]*)(?P=quote)"""
    r"""(?P<colon>\s*:\s*["']?)(?P<value>[^\s"',}]+)"""
)
_AUTHORIZATION: Final = re.compile(
    r"(?i)(?P<kept>\bauthorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",}&)]+"
)
_BEARER: Final = re.compile(r"(?i)(?P<kept>\bbearer\s+)[\w.~+/=-]{8,}")
_KNOWN: Final = re.compile(
    r"\b(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_\w{30,}|github_pat_\w{30,}"
    r"|glpat-[\w-]{20,}|xox[a-z]-[\w-]{20,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]+\.eyJ[\w.-]{8,})"
)
"""Tokens in a known format."""


def is_secret_name(name: str) -> bool:
    """Return True if a name such as `--api-key`, `HF_TOKEN` or `wandb.apiKey` is a secret's."""
    words = [word.lower() for word in _WORD.findall(name)]
    if ANY_WORDS.intersection(words):
        return True
    if not words or words[-1] not in LAST_WORDS or ROLES.intersection(words):
        return False
    is_count = len(words) == 1 or COUNTS.intersection(words)
    return not (words[-1] in ("tokens", "keys") and is_count)


def without_secrets(text: str) -> str:
    """Mask passwords, keys and tokens in text such as an error message."""
    text = _USER.sub(MASK, text)
    for pattern in (_PARAMETER, _SETTING):
        text = pattern.sub(_masked_value, text)
    text = _AUTHORIZATION.sub(rf"\g<kept>{MASK}", text)
    text = _BEARER.sub(rf"\g<kept>{MASK}", text)
    text = _MEMBER.sub(_masked_member, text)
    return _KNOWN.sub(MASK, text)


def without_secret(name: str, value: str) -> str:
    """Mask secrets in the value of a setting, or the entire value if the name is a secret's."""
    return MASK if value and is_secret_name(name) else without_secrets(value)


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Mask secrets in command-line arguments.

    In addition to `without_secrets`, mask the argument after an option with a secret's name:
    `--api-key X`.
    """
    masked: list[str] = []
    is_secret_next = False
    for argument in arguments:
        if is_secret_next and not argument.startswith("--"):
            masked.append(MASK)
            is_secret_next = False
            continue
        name, separator, _ = argument.partition("=")
        if separator and _OPTION.fullmatch(name) and is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(without_secrets(argument))
        is_option = argument.startswith("-") and not separator and _OPTION.fullmatch(argument)
        is_secret_next = bool(is_option) and is_secret_name(argument)
    return tuple(masked)


def _masked_value(match: re.Match[str]) -> str:
    return f"{match['name']}={MASK}" if is_secret_name(match["name"]) else match[0]


def _masked_member(match: re.Match[str]) -> str:
    name, quote = match["name"], match["quote"]
    # Prose such as `unknown key: x` and `unexpected token: x` contains no secret.
    in_prose = not quote and name.lower() in LAST_WORDS
    if in_prose or not is_secret_name(name) or match["value"].lower() in ("bearer", "basic"):
        return match[0]
    return f"{quote}{name}{quote}{match['colon']}{MASK}"
