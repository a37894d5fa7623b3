"""Reads rule files, and writes the initial one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from ms_data.arguments import check_items
from ms_data.cleaning.rows import RowRule
from ms_data.cleaning.rule import Rule
from ms_data.cleaning.rules import RULES
from ms_data.cleaning.words import SPLITTERS
from ms_data.errors import ConfigError
from ms_data.files.untrusted import read_toml
from ms_data.settings import nearest, one_of
from ms_data.settings.keys import Key, KeyGroup, class_path, groups_of
from ms_data.settings.run_file import build
from ms_data.settings.template import template_text

_WORD_RULES = ("gopher_repetition", "gopher_quality", "c4_quality", "fineweb_quality")
_ENABLED = (
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
# Repairs come before the rules that measure the text, and masking comes after them.
_ORDER = (*_ENABLED, "c4_paragraphs", "decontaminate", "pictures", "sound")
_INITIAL_SETTINGS: dict[str, dict[str, Any]] = {
    "unicode": {"form": "NFC"},
    "control_characters": {"line_ends": True},
    "language": {"keep": ["en", "zh"]},
    "chinese_text": {"languages": ["zh"]},
    "chinese_quality": {"languages": ["zh"]},
    "personal_data": {"action": "mask"},
    **{name: {"languages": ["en"]} for name in _WORD_RULES},
}

Rules = str | Path | Mapping[str, Any] | Sequence[Rule]
"""A rule file, its tables, or the rules in order."""


@frozen(kw_only=True)
class RuleSet:
    """Rules in the order of application."""

    rules: tuple[Rule, ...]
    words: str = field(default="plain", validator=one_of(*SPLITTERS))
    """Word splitter: plain, or spacy for the same word counts as datatrove."""

    @property
    def for_rows(self) -> bool:
        """Whether the rules are for rows with images and audio instead of text."""
        return isinstance(self.rules[0], RowRule)

    def settings(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the rule names with all their settings."""
        return [(rule.name, asdict(rule)) for rule in self.rules]


def make_rule(name: str, settings: Mapping[str, Any], *, where: str) -> Rule:
    """Create a rule from its name and settings.

    Raises:
        ConfigError: the rule does not exist, or a setting is unknown or invalid.
    """
    if name not in RULES:
        raise ConfigError(f"{where}: unknown rule {name!r}; {nearest(name, RULES)}")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: {name} must be a table; write [{name}] above its settings")
    return build(RULES[name], settings, where=f"{where}, {name}")


def read_rules(rules: Rules) -> RuleSet:
    """Read rules from a file or its tables.

    Raises:
        ConfigError: the file cannot be read, holds no rules, or has an invalid setting.
    """
    if isinstance(rules, str | Path):
        return _rule_set(read_toml(rules, error=ConfigError), str(rules))
    if isinstance(rules, Mapping):
        return _rule_set(rules, "rules")
    check_items("rules", rules, Rule, "rules", error=ConfigError)
    return _checked_set(RuleSet(rules=tuple(rules)), "rules")


def rules_template() -> str:
    """Return the initial rule file: rules for English and Chinese, with all settings."""
    keys = []
    for name in _ORDER:
        groups = groups_of(class_path(RULES[name]), hidden=("name", "shown"))
        inner = {key.name: key for group in groups for key in group.keys}
        inner["languages"] = _languages(inner["languages"], name)
        keys.append(Key(name=name, meaning=groups[0].title + ".", inner=tuple(inner.values())))
    general = KeyGroup(
        title="Rules run in the order of their tables; delete a table to disable its rule",
        keys=(Key(name="words", meaning=_meaning("words"), default="plain"), *keys),
    )
    title = "Rules of ms-data clean: which documents to keep, change and drop."
    text = template_text(title, [general], _INITIAL_SETTINGS)
    return _comment_out(text, [name for name in _ORDER if name not in _ENABLED])


def _rule_set(tables: Mapping[str, Any], where: str) -> RuleSet:
    tables = dict(tables)
    words = tables.pop("words", "plain")
    rules = tuple(make_rule(name, table, where=where) for name, table in tables.items())
    try:
        return _checked_set(RuleSet(rules=rules, words=words), where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _checked_set(rules: RuleSet, where: str) -> RuleSet:
    if not rules.rules:
        raise ConfigError(f"{where} holds no rules; create a file with `ms-data init clean`")
    text_rules = [rule.name for rule in rules.rules if not isinstance(rule, RowRule)]
    if text_rules and len(text_rules) < len(rules.rules):
        raise ConfigError(
            f"{where}: {text_rules[0]} is a rule for text, pictures and sound are rules for rows "
            "of messages; put them in separate files"
        )
    return rules


def _languages(key: Key, name: str) -> Key:
    default = list(RULES[name]().languages) if name in _ENABLED else []
    return evolve(key, default=default)


def _meaning(name: str) -> str:
    groups = groups_of(class_path(RuleSet))
    return next(key.meaning for group in groups for key in group.keys if key.name == name)


def _comment_out(text: str, names: list[str]) -> str:
    """Comment out the tables of some rules."""
    for name in names:
        text = text.replace(f"\n[{name}]", f"\n# [{name}]")
    return text
