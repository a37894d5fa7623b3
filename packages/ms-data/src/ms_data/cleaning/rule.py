"""Defines rules, which keep, change or drop documents; `rules` holds them."""

from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple

from attrs import Attribute, field, frozen

from ms_data.cleaning.text import Text
from ms_data.errors import ConfigError
from ms_data.settings import shown


class Drop(NamedTuple):
    """Why a document is dropped."""

    setting: str
    """The setting that decided; with the rule's name the reason in the ledger."""
    value: float | str
    """What was found."""
    limit: float | str
    """What the setting asks."""


class Cut(NamedTuple):
    """Parts of a document that were cut or masked for one reason."""

    setting: str
    times: int
    size_bytes: int
    example: str = ""
    """One of them; empty where it must not be shown."""


class Change(NamedTuple):
    """A document that is kept with another text."""

    text: str
    cuts: tuple[Cut, ...] = ()


Outcome = Drop | Change | None
"""None keeps a document as it is."""


def _codes(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f'{attribute.name} is {shown(value)}; give codes, as ["en", "zh"]')


def as_tuple(value: object) -> object:
    """Convert a list from a file to a tuple; leave anything else for the validator to refuse."""
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class Rule(ABC):
    """What a rule is: settings, and what they make of a document."""

    name: ClassVar[str]
    """As in a file of rules."""
    shown: ClassVar[bool] = True
    """Whether the beginning of a document that it drops may be shown."""
    languages: tuple[str, ...] = field(default=(), converter=as_tuple, validator=_codes)
    """Languages of the documents that the rule looks at, as ISO 639-1 codes; none: all."""

    @abstractmethod
    def apply(self, text: Text, /) -> Outcome:
        """Keep, change or drop a document."""

    def check(self) -> None:
        """Check, before any work, that what the rule needs is there.

        Raises:
            SettingError: a library or a file is missing.
        """
        if self.languages:
            from ms_data.cleaning.languages import detector

            detector()

    def identity(self) -> str:
        """Name what decides beside the settings, such as a library; empty if nothing does."""
        return library_version("Resiliparse") if self.languages else ""


def library_version(name: str) -> str:
    """Return the name and version of a library, as another version may decide otherwise."""
    return f"{name} {version(name)}"


def shares(*, count: int) -> Any:
    """Check for a list of as many shares from 0 to 1."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        fits = isinstance(value, tuple) and len(value) == count
        if not fits or not all(type(one) in (int, float) and 0 <= one <= 1 for one in value):  # type: ignore[attr-defined]
            raise ConfigError(
                f"{attribute.name} is {shown(value)}; give {count} numbers from 0 to 1"
            )

    return check


def texts(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check for a list of texts."""
    if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"{attribute.name} is {shown(value)}; give a list of texts")


def over(setting: str, value: float, limit: float) -> Drop | None:
    """Drop what is above a limit."""
    return Drop(setting, round(value, 6), limit) if value > limit else None


def under(setting: str, value: float, limit: float) -> Drop | None:
    """Drop what is below a limit."""
    return Drop(setting, round(value, 6), limit) if value < limit else None
