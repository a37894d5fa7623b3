"""Reads a file of rules, and writes one to begin with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from ms_data.cleaning.rows import RowRule
from ms_data.cleaning.rule import Rule
from ms_data.cleaning.rules import RULES
from ms_data.cleaning.words import SPLITTERS
from ms_data.errors import ConfigError
from ms_data.files.untrusted import read_toml
from ms_data.settings import nearest, one_of
from ms_data.settings.keys import Key, KeyGroup, groups_of, place_of
from ms_data.settings.run_file import build
from ms_data.settings.template import template_text

_WORD_RULES = ("gopher_repetition", "gopher_quality", "c4_quality", "fineweb_quality")
_BEGUN = (
    "unicode",
    "control_characters",
    "language",
    "chinese_text",
    "gopher_repetition",
    "gopher_quality",
    "c4_quality",
    "fineweb_quality",
    "chinese_quality",
    "personal_data",
)
_ORDER = (*_BEGUN, "c4_paragraphs", "decontaminate", "pictures", "sound")
_BEGIN: dict[str, dict[str, Any]] = {
    "unicode": {"form": "NFC"},
    "control_characters": {"line_ends": True},
    "language": {"keep": ["en", "zh"]},
    "chinese_text": {"languages": ["zh"]},
    "chinese_quality": {"languages": ["zh"]},
    "personal_data": {"action": "mask"},
    **{name: {"languages": ["en"]} for name in _WORD_RULES},
}

Rules = str | Path | Mapping[str, Any] | Sequence[Rule]
"""A file of rules, its tables, or the rules themselves, in order."""


@frozen(kw_only=True)
class RuleSet:
    """Rules in the order in which they are applied."""

    rules: tuple[Rule, ...]
    words: str = field(default="plain", validator=one_of(*SPLITTERS))
    """What splits text into words: plain, or spacy for the words that datatrove counts."""

    @property
    def of_rows(self) -> bool:
        """Whether they look at rows with pictures and sound; else at text."""
        return isinstance(self.rules[0], RowRule)

    def settings(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the rules by name, with all their settings."""
        return [(rule.name, asdict(rule)) for rule in self.rules]


def make_rule(name: str, settings: Mapping[str, Any], *, where: str) -> Rule:
    """Make a rule from its name and settings.

    Raises:
        ConfigError: there is no such rule, or a setting is unknown or cannot be used.
    """
    if name not in RULES:
        raise ConfigError(f"{where}: unknown rule {name!r}; {nearest(name, RULES)}")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: {name} is no table; write [{name}] above its settings")
    return build(RULES[name], settings, where=f"{where}, {name}")


def read_rules(rules: Rules) -> RuleSet:
    """Read rules from a file or its tables.

    Raises:
        ConfigError: the file cannot be read, holds no rule, or a setting cannot be used.
    """
    if isinstance(rules, str | Path):
        return _rule_set(read_toml(rules, error=ConfigError), str(rules))
    if isinstance(rules, Mapping):
        return _rule_set(rules, "rules")
    return _some(RuleSet(rules=tuple(rules)), "rules")


def rules_template() -> str:
    """Return a file of rules to begin with: those for English and Chinese, with all settings."""
    keys = []
    for name in _ORDER:
        groups = groups_of(place_of(RULES[name]), hidden=("name", "shown"))
        inner = {key.name: key for group in groups for key in group.keys}
        inner["languages"] = _languages(inner["languages"], name)
        keys.append(Key(name=name, meaning=groups[0].title + ".", inner=tuple(inner.values())))
    general = KeyGroup(
        title="Rules are applied in the order of their tables; a table that is deleted is off",
        keys=(Key(name="words", meaning=_meaning("words"), default="plain"), *keys),
    )
    title = "What ms-data clean keeps, changes and drops."
    text = template_text(title, [general], _BEGIN)
    return _off(text, [name for name in _ORDER if name not in _BEGUN])


def _rule_set(tables: Mapping[str, Any], where: str) -> RuleSet:
    tables = dict(tables)
    words = tables.pop("words", "plain")
    rules = tuple(make_rule(name, table, where=where) for name, table in tables.items())
    try:
        return _some(RuleSet(rules=rules, words=words), where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _some(rules: RuleSet, where: str) -> RuleSet:
    if not rules.rules:
        raise ConfigError(f"{where} holds no rule; `ms-data init clean` writes one to begin with")
    of_text = [rule.name for rule in rules.rules if not isinstance(rule, RowRule)]
    if of_text and len(of_text) < len(rules.rules):
        raise ConfigError(
            f"{where}: {of_text[0]} looks at text, and pictures and sound at rows of messages; give"
            " each kind a file of its own"
        )
    return rules


def _languages(key: Key, name: str) -> Key:
    default = list(RULES[name]().languages) if name in _BEGUN else []
    return evolve(key, default=default)


def _meaning(name: str) -> str:
    groups = groups_of(place_of(RuleSet))
    return next(key.meaning for group in groups for key in group.keys if key.name == name)


def _off(text: str, names: list[str]) -> str:
    """Put the tables of some rules behind a #."""
    for name in names:
        text = text.replace(f"\n[{name}]", f"\n# [{name}]")
    return text
