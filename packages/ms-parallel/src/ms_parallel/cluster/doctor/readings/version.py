"""Comparable versions."""

import re

CANDIDATE = re.compile(r"\.?(?:rc|alpha|beta)\.?(\d{0,9})", re.IGNORECASE)
PARTS = 6


def version(text: str) -> tuple[int, ...]:
    """Parse a version for comparison; prereleases (`8.0.RC2`) come before their release.

    Args:
        text: version such as `580.65.06`, `2.13.0+cu130` or `8.3.RC1`.
    """
    base = text.split("+")[0]
    candidate = CANDIDATE.search(base)
    numbers = re.findall(r"\d{1,9}", base[: candidate.start()] if candidate else base)
    padded = [*map(int, numbers[:PARTS]), *[0] * (PARTS - len(numbers))]
    return (*padded, -1 if candidate else 0, int(candidate[1] or 0) if candidate else 0)


def release(text: str) -> str:
    """First three numbers of a version, such as `2.13.0` for `2.13.0.post3+cpu`."""
    return ".".join(re.findall(r"\d{1,9}", text.split("+")[0])[:3])
