"""The site builds without warnings, and its pages have the expected content.

Run by `nox -s docs`, which installs mkdocs; skipped elsewhere.
"""

import inspect
import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe")
pytest.importorskip("mkdocs")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "extensions"))


def build_site(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site in strict mode."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without warnings."""
    folder = tmp_path_factory.mktemp("site")
    result = build_site(ROOT / "mkdocs.yml", folder)
    assert "WARNING" not in result.stderr, result.stderr
    assert result.returncode == 0, result.stderr
    return folder


def text_of(page: Path, heading: str = "") -> str:
    """Text of a page, or from the heading with this id to the end of the next table."""
    html = page.read_text()
    if heading:
        html = html[html.index(f'id="{heading}"') :]
        html = html[: html.index("</table>")]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


PAGES = {
    "broken link": "[there](nowhere.md)",
    "broken anchor": "[there](#nowhere)",
    "broken absolute link": "[there](/nowhere/)",
    "missing snippet": '--8<-- "nowhere.md"',
    "missing name": "::: ms_data.nowhere",
}


@pytest.mark.parametrize("name", [*PAGES, "no mistake"])
def test_a_page_with_a_mistake_stops_the_build(tmp_path: Path, name: str) -> None:
    """With the settings of mkdocs.yml, each mistake gives a nonzero exit code."""
    (tmp_path / "docs").mkdir()
    text = PAGES.get(name, "[here](#page)")
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{text}\n")
    config = tmp_path / "mkdocs.yml"
    extension = ROOT / "docs" / "extensions" / "attrs_classes.py"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md]\n"
        f"hooks: [{ROOT / 'docs' / 'extensions' / 'generated.py'}]\n"
        "plugins:\n  - search\n  - mkdocstrings:\n      handlers:\n        python:\n"
        f"          paths: [{ROOT / 'packages/ms-data/src'}]\n"
        f"          options: {{extensions: [{extension}]}}\n"
    )
    assert bool(build_site(config, tmp_path / "site").returncode) == (name in PAGES)


def test_a_trainers_page_shows_its_parameters_with_types_and_defaults(site: Path) -> None:
    """Inherited parameters too; only parameters without a default are required."""
    text = text_of(site / "api" / "ms_parallel" / "index.html", "ms_parallel.DistributedTrainer")
    assert "DistributedTrainer ( model_arch : str | Path , " in text
    table = text[text.index("Name Type Description Default") :] + " "
    assert re.search(r" model_arch str \| Path .{20,300}? required ", table)
    assert re.search(r" learning_rate float .{10,200}? 0\.0003 ", table)
    assert table.count(" required ") == 1


def test_no_page_shows_the_code_of_a_field(site: Path) -> None:
    """Pages do not show `field(...)` or validators as values."""
    for page in sorted((site / "api").glob("*/index.html")):
        source = r'<details class="mkdocstrings-source">.*?</details>'
        html = re.sub(source, "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))
        for code in (r"= field \(", r"validator =", r"factory ="):
            assert not re.search(code, text), (page, code)


def test_the_front_page_says_that_nothing_is_released(site: Path) -> None:
    """The front page says so as long as the changelogs have no version."""
    released = [
        path.parent.name
        for path in (ROOT / "packages").glob("*/CHANGELOG.md")
        if re.search(r"^## \d", path.read_text(), re.MULTILINE)
    ]
    text = text_of(site / "index.html")
    assert bool(released) != ("not released yet" in text)
    assert "core released" not in text


SAMPLE = '''
from attrs import Factory, define, field, frozen

@define
class Base:
    first: int
    """The first."""
    _hidden: str = field(default="x", kw_only=True)
    given: list[int] = field(factory=list)
    made: int = field(init=False, default=3)
    """Made."""

@frozen(kw_only=True)
class Settings:
    """Says what.

    Args:
        size: told already.

    Raises:
        ValueError: never.
    """

    size: int = field(default=1, converter=int)
    rate: float
    """Updates a second,
    on two lines."""

@define
class Derived(Base):
    last: int = 4
    """The last."""
    first: int = 2
'''


def test_signatures_match_the_ones_that_attrs_generates(tmp_path: Path) -> None:
    """Names, order, kinds and defaults, with base classes, aliases and factories."""
    from attrs_classes import AttrsClasses

    (tmp_path / "sample.py").write_text(SAMPLE)
    extensions = griffe.load_extensions(AttrsClasses)
    loaded = griffe.load("sample", search_paths=[tmp_path], extensions=extensions)
    names: dict[str, type] = {}
    exec(SAMPLE, names)
    for name in ("Base", "Settings", "Derived"):
        real = inspect.signature(names[name]).parameters.values()
        shown = [param for param in loaded[name].parameters if param.name != "self"]
        assert [(p.name, p.default is not None, str(p.kind.name)) for p in shown] == [
            (p.name, p.default is not p.empty, p.kind.name.lower()) for p in real
        ]
    docstring = loaded["Settings"].docstring.value
    assert docstring.count("size:") == 1
    assert "    rate: Updates a second,\n        on two lines.\n" in docstring
    assert docstring.index("Args:") < docstring.index("rate:") < docstring.index("Raises:")
    assert loaded["Settings"]["rate"].docstring is None
    assert loaded["Base"]["made"].docstring.value == "Made."


def pages_with(site: Path, language: str, words: str) -> set[str]:
    """Pages that the search in a language finds for these words."""
    index = json.loads((site / language / "search" / "search_index.json").read_text())
    return {
        section["location"].partition("#")[0]
        for section in index["docs"]
        if words.lower() in (section["title"] + " " + section["text"]).replace("\u200b", "").lower()
    }


def test_each_language_is_searched_alone(site: Path) -> None:
    """Each language finds its own pages and the API pages."""
    assert "install/" in pages_with(site, ".", "need no torch at all")
    assert "install/" in pages_with(site, "zh", "完全不需要 torch")
    assert pages_with(site, ".", "完全不需要 torch") == set()
    assert pages_with(site, "zh", "need no torch at all") == set()
    assert not any(page.startswith("zh/") for page in pages_with(site, ".", "e"))
    assert "api/ms_parallel/" in pages_with(site, ".", "DistributedTrainer")
    assert "api/ms_parallel/" in pages_with(site, "zh", "DistributedTrainer")
    marked = (site / "zh" / "search" / "search_index.json").read_text()
    assert "\\u200b" in marked  # the word separator, escaped in JSON


@pytest.mark.parametrize(
    ("language", "words", "page"),
    [
        (".", "OOM", "how-to/out-of-memory/"),
        (".", "out of memory", "how-to/out-of-memory/"),
        (".", "gradient accumulation", "how-to/out-of-memory/"),
        (".", "gradient checkpointing", "how-to/out-of-memory/"),
        (".", "activation checkpointing", "how-to/out-of-memory/"),
        (".", "bf16", "how-to/out-of-memory/"),
        (".", "fp16", "how-to/out-of-memory/"),
        (".", "FSDP", "how-to/out-of-memory/"),
        (".", "resume", "how-to/another-width/"),
        (".", "checkpoint", "how-to/another-width/"),
        (".", "LoRA", "how-to/lora-on-chats/"),
        (".", "fine-tune", "how-to/lora-on-chats/"),
        ("zh", "OOM", "how-to/out-of-memory/"),
        ("zh", "显存", "how-to/out-of-memory/"),
        ("zh", "显存不足", "how-to/out-of-memory/"),
        ("zh", "梯度累积", "how-to/out-of-memory/"),
        ("zh", "梯度检查点", "how-to/out-of-memory/"),
        ("zh", "混合精度", "how-to/out-of-memory/"),
        ("zh", "bf16", "how-to/out-of-memory/"),
        ("zh", "断点续训", "how-to/another-width/"),
        ("zh", "续训", "how-to/another-width/"),
        ("zh", "检查点", "how-to/another-width/"),
        ("zh", "LoRA", "how-to/lora-on-chats/"),
        ("zh", "微调", "how-to/lora-on-chats/"),
        ("zh", "监督微调", "align/sft/"),
    ],
)
def test_common_search_words_find_the_right_page(
    site: Path, language: str, words: str, page: str
) -> None:
    """Including the terms of other libraries."""
    assert page in pages_with(site, language, words)


def test_pages_load_the_search_index_of_their_language(site: Path) -> None:
    """The script looks for the index relative to `base`."""
    for page, steps in (("install", ".."), ("zh/install", ".."), ("zh/how-to/evaluate", "../..")):
        html = (site / page / "index.html").read_text()
        assert f'"base": "{steps}"' in html, page
    assert '"base": "."' in (site / "zh" / "index.html").read_text()


def test_every_key_can_be_linked_to(site: Path) -> None:
    """In both languages."""
    for language in (".", "zh"):
        html = (site / language / "reference" / "run-files" / "index.html").read_text()
        for anchor in ("ms-parallel-train.learning_rate", "ms-align-ppo.lora.rank"):
            assert f'id="{anchor}"' in html
            assert f'href="#{anchor}"' in html


def test_the_reference_shows_keys_and_messages_in_both_languages(site: Path) -> None:
    """All marks are replaced by tables."""
    for page, word in (("reference", "Key"), ("zh/reference", "键")):
        html = (site / page / "run-files" / "index.html").read_text()
        assert "<!-- keys:" not in html
        assert f"<th>{word}</th>" in html
        assert "<code>kl_coeff</code>" in html
        assert "<!-- errors:" not in (site / page / "errors" / "index.html").read_text()
