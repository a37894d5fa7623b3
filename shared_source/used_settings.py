"""Refusal of settings that have no effect because of the value of another setting.

A default is never refused, so a run file from `init`, which lists defaults, stays valid.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from attrs import NOTHING, Attribute, Factory, field, fields, frozen

MAX_CHARACTERS = 80


def _names(value: str) -> tuple[str, ...]:
    return tuple(value.split())


def _never(settings: Any) -> bool:
    return False


@frozen
class UsedIf:
    """Condition without which settings have no effect."""

    names: tuple[str, ...] = field(converter=_names)
    """Names of the settings, separated by spaces."""
    condition: str
    """Words that complete "is only used", such as "with schedule='search'"."""
    holds: Callable[[Any], object] = _never
    """Whether the settings, an instance or parsed arguments, meet the condition. Default: they do
    not, for a caller that has found so."""


def unused(settings: Any, rules: Iterable[UsedIf]) -> Iterator[tuple[str, str]]:
    """Yield each setting that differs from its default but has no effect, and its condition.

    Args:
        settings: instance of an attrs class.
        rules: conditions of its fields.
    """
    defaults = {f.name: _default(f) for f in fields(type(settings))}
    return _unused(settings, defaults, rules)


def check_used(
    settings: Any, rules: Iterable[UsedIf], *, error: type[Exception], prefix: str = ""
) -> None:
    """Check that every setting that differs from its default has an effect.

    Args:
        settings: instance of an attrs class.
        rules: conditions of its fields.
        error: exception class to raise.
        prefix: text in front of a name in the message, such as `tuning.`.

    Raises:
        error: a setting has no effect; the message names it and its condition.
    """
    for name, condition in unused(settings, rules):
        raise error(refusal(f"{prefix}{name}", getattr(settings, name), condition))


def check_arguments_used(
    parser: ArgumentParser, options: Namespace, rules: Iterable[UsedIf]
) -> None:
    """Exit with code 2 if an option of a command line has no effect."""
    flags = {action.dest: action.option_strings for action in parser._actions}
    defaults = {name: parser.get_default(name) for name in flags}
    for name, condition in _unused(options, defaults, rules):
        parser.error(refusal(flags[name][-1], getattr(options, name), condition))


def refusal(name: str, value: object, condition: str) -> str:
    """Return the message about a setting without effect."""
    text = str(value)
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
    return f"{name} is only used {condition}, so {text} has no effect; leave {name} out"


def _unused(
    settings: Any, defaults: Mapping[str, Any], rules: Iterable[UsedIf]
) -> Iterator[tuple[str, str]]:
    for rule in rules:
        # The condition is evaluated last: it may read files.
        changed = [n for n in rule.names if getattr(settings, n) != defaults[n]]
        if changed and not rule.holds(settings):
            yield from ((name, rule.condition) for name in changed)


def _default(attribute: "Attribute[Any]") -> Any:
    """Return the value of a field that is left out."""
    default: Any = attribute.default
    if isinstance(default, Factory):  # type: ignore[arg-type]
        return default.factory()
    if attribute.converter is None or default is NOTHING:
        return default
    return cast(Any, attribute.converter)(default)
