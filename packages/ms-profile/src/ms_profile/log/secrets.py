"""Masks secrets in a command line, which a manifest stores and a report shows."""

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"
LAST_WORDS: Final = frozenset(
    {"key", "keys", "token", "tokens", "auth", "authorization", "pat", "sig", "signature"}
)
"""Words that mark a secret where a name ends in them: `api-key`, but not `num-key-value-heads`."""
ANY_WORDS: Final = frozenset(
    {"apikey", "password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets",
     "credential", "credentials"}
)  # fmt: skip
"""Words that mark a secret anywhere in a name."""
COUNTS: Final = frozenset({"max", "min", "num", "n", "new", "total", "batch", "number"})
"""Words that make a name that ends in `tokens` or `keys` a count: `max-new-tokens`."""
NAME: Final = re.compile(r"[-+~]{0,2}[A-Za-z][\w.\-/]*")
WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
USER: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
PARAMETER: Final = re.compile(r"([?&;])([^=&;?#\s]+)=([^&;#\s]*)")
SETTING: Final = re.compile(r"""(?<![\w\-.?&;])([A-Za-z][\w\-.]*)=("[^"]*"|'[^']*'|[^\s,;)&]+)""")
BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
KNOWN: Final = re.compile(
    r"\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|AIza|eyJ[\w-]+\.eyJ)[\w.\-]{8,}"
)
"""Tokens that say themselves what they are."""


def is_secret_name(name: str) -> bool:
    """Return whether a name such as `--api-key`, `HF_TOKEN` or `wandb.apiKey` names a secret."""
    words = [word.lower() for word in WORD.findall(name)]
    if ANY_WORDS.intersection(words):
        return True
    if not words or words[-1] not in LAST_WORDS:
        return False
    return not (words[-1] in ("tokens", "keys") and COUNTS.intersection(words))


def mask_secrets(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return command-line arguments with the values of secrets replaced by `***`.

    Values of options and settings that are named like a secret are masked (`--api-key X`,
    `--api-key=X`, `HF_TOKEN=X`, `-H 'Authorization: Bearer X'`), user names and passwords in URLs,
    their parameters that are named so, and tokens of a known form wherever they stand.
    """
    masked: list[str] = []
    pending = False
    for argument in arguments:
        if pending and not argument.startswith("--"):
            masked.append(MASK)
            pending = False
            continue
        name, separator, _ = argument.partition("=")
        if separator and NAME.fullmatch(name) and is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(argument))
        named = argument.startswith("-") and not separator and NAME.fullmatch(argument)
        pending = bool(named) and is_secret_name(argument)
    return tuple(masked)


def mask_text(text: str) -> str:
    """Return a text, such as an error message, with its secrets replaced by `***`.

    Masks user names and passwords in URLs, `name=value` and `name: value` where the name is that
    of a secret, bearer tokens, and tokens of a known form.
    """
    text = USER.sub(MASK, text)
    text = PARAMETER.sub(
        lambda found: f"{found[1]}{found[2]}={MASK}" if is_secret_name(found[2]) else found[0],
        text,
    )
    text = SETTING.sub(
        lambda found: f"{found[1]}={MASK}" if is_secret_name(found[1]) else found[0], text
    )
    text = BEARER.sub(lambda found: f"{found[1]} {MASK}", text)
    # A header or setting within one argument: `Authorization: X`, `{"api_key": "X"}`.
    text = re.sub(
        r"""(["']?)([A-Za-z][\w\-]*)\1(\s*:\s*)(["']?)([^\s"',}]+)\4""",
        lambda found: (
            f"{found[1]}{found[2]}{found[1]}{found[3]}{found[4]}{MASK}{found[4]}"
            if is_secret_name(found[2]) and found[5].lower() not in ("bearer", "basic")
            else found[0]
        ),
        text,
    )
    return KNOWN.sub(MASK, text)
