"""Report which sections of the Chinese pages lag behind the English ones.

`page.zh.md` translates `page.md`; its front matter lists a fingerprint of each English section in
order. When an English section changes, its fingerprint no longer matches and the section is
reported. For a guide, which includes a package's README, the README's sections count:

    python docs/extensions/translations.py                  # list stale sections
    python docs/extensions/translations.py --accept PAGE    # PAGE.zh.md is up to date again
"""

import argparse
import re
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FRONT = re.compile(r"\A---\ntranslates:\n((?:  - .*\n)*)---\n")
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
GENERATED = {"reference/refused-combinations.md", "reference/transformers.md"}
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """English pages that need a translation; generated pages are English only."""
    english = (path for path in sorted(DOCS.rglob("*.md")) if not path.name.endswith(".zh.md"))
    handwritten = (path for path in english if path.parent.name != "api")
    return [path for path in handwritten if path.relative_to(DOCS).as_posix() not in GENERATED]


def translation_of(page: Path) -> Path:
    """Path of the Chinese page."""
    return page.with_name(f"{page.stem}.zh.md")


def english_of(page: Path) -> str:
    """Text of an English page with its includes expanded."""
    text = page.read_text(encoding="utf-8")
    return INCLUDE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), text)


def sections_of(text: str) -> list[tuple[str, str]]:
    """Headings with their text up to the next heading, code blocks included."""
    covered = FENCE.sub(lambda block: re.sub(r"^#", " ", block[0], flags=re.MULTILINE), text)
    starts = [match.start() for match in re.finditer(r"^#+ ", covered, re.MULTILINE)]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [(part.partition("\n")[0], part) for part in parts]


def fingerprint(section: str) -> str:
    """Eight hexadecimal digits that change with the words of a section."""
    return sha256(" ".join(section.split()).encode()).hexdigest()[:8]


def stale_sections(page: Path) -> list[str]:
    """Headings of an English page that changed after they were translated."""
    front = FRONT.match(translation_of(page).read_text(encoding="utf-8"))
    accepted = [line.split()[1] for line in front[1].splitlines()] if front else []
    sections = sections_of(english_of(page))
    accepted += [""] * (len(sections) - len(accepted))
    return [
        heading
        for (heading, text), accepted_fingerprint in zip(sections, accepted, strict=False)
        if fingerprint(text) != accepted_fingerprint
    ]


def accept(page: Path) -> None:
    """Write the fingerprints of an English page into its translation."""
    translation = translation_of(page)
    text = FRONT.sub("", translation.read_text(encoding="utf-8")).lstrip()
    sections = sections_of(english_of(page))
    lines = [f"  - {fingerprint(part)} {heading.lstrip('# ')}" for heading, part in sections]
    front = "\n".join(["---", "translates:", *(quoted(line) for line in lines), "---"])
    translation.write_text(f"{front}\n\n{text}", encoding="utf-8")


def quoted(line: str) -> str:
    """Remove colons from a list item, so YAML reads it as text."""
    return f"{line[:4]}{line[4:].replace(':', '')}"


def main() -> int:
    """Accept pages and print stale sections; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--accept", nargs="*", default=[], metavar="PAGE", type=Path)
    for page in parser.parse_args().accept:
        accept(page.resolve())
    code = 0
    for page in pages():
        missing = not translation_of(page).exists()
        for heading in ["no translation"] if missing else stale_sections(page):
            sys.stdout.write(f"{page.relative_to(ROOT)}: {heading}\n")
            code = 1
    for words in new_meanings():
        sys.stdout.write(f"meanings.zh.toml: {words}\n")
        code = 1
    return code


def new_meanings() -> list[str]:
    """Meanings of keys without a Chinese text; empty if dependencies are not installed."""
    try:
        from generated import untranslated_meanings

        return untranslated_meanings()
    except ImportError:
        return []


if __name__ == "__main__":
    sys.exit(main())
