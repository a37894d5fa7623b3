"""Model card of an exported folder: README.md with recipe, measured quality and how to run it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ms_compress import __version__
from ms_compress.errors import ExportError
from ms_compress.files.untrusted import read_text

FILE = "README.md"
LICENSE = re.compile(r"^license(_name|_link)?:[^\n]{1,200}$", re.MULTILINE)
"""License lines in the front matter of a model card."""
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def model_card(
    *,
    name: str,
    base: Path,
    scheme: str,
    facts: Sequence[tuple[str, str]],
    settings: Mapping[str, Any],
    run: Sequence[str],
) -> str:
    """Return a model card in Markdown.

    Args:
        name: name of the exported folder.
        base: folder of the base model, whose license is copied from its card.
        scheme: name of the scheme.
        facts: rows of the table: name and value of a measurement.
        settings: settings of the run.
        run: code blocks that run the model, each starting with the name of its language.
    """
    table = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in facts)
    recipe = "\n".join(f"{key} = {_toml(value)}" for key, value in sorted(settings.items()))
    blocks = "\n\n".join(f"```{block}\n```" for block in run)
    return (
        "---\n"
        + "".join(f"{line}\n" for line in _license(base))
        + f"tags:\n- quantized\n- {scheme}\n---\n\n"
        + f"# {name}\n\n"
        + f"{base.name}, quantized to `{scheme}` with ms-compress {__version__}.\n\n"
        + f"| | |\n|---|---|\n{table}\n\n"
        + f"## Run\n\n{blocks}\n\n"
        + f"## Recipe\n\n```toml\n{recipe}\n```\n"
    )


def _license(base: Path) -> list[str]:
    """Return the license lines of the base model's card."""
    if not (base / FILE).is_file():
        return []
    front_matter = FRONT_MATTER.match(read_text(base / FILE, error=ExportError))
    return [] if front_matter is None else [m[0] for m in LICENSE.finditer(front_matter[1])]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int | float) else repr(str(value))
