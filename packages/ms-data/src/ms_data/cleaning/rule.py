"""The rule interface: rules keep, change or drop documents; `rules` contains them."""

from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple

from attrs import Attribute, field, frozen

from ms_data.cleaning.text import Text
from ms_data.errors import ConfigError
from ms_data.settings import short_repr


class Drop(NamedTuple):
    """Reason for dropping a document."""

    setting: str
    """The setting that decided; with the rule name, it is the reason in the ledger."""
    value: float | str
    """The measured value."""
    limit: float | str
    """The value of the setting."""


class Cut(NamedTuple):
    """Parts of a document that were cut or masked for one reason."""

    setting: str
    times: int
    size_bytes: int
    example: str = ""
    """An example; empty if it must not be shown."""


class Change(NamedTuple):
    """A kept document with a changed text."""

    text: str
    cuts: tuple[Cut, ...] = ()


Outcome = Drop | Change | None
"""None keeps a document unchanged."""


def _language_codes(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(code, str) and code for code in value):
        raise ConfigError(
            f'{attribute.name} must be a list of codes such as ["en", "zh"], got '
            f"{short_repr(value)}"
        )


def as_tuple(value: object) -> object:
    """Convert a list from a file to a tuple; the validator rejects other values."""
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class Rule(ABC):
    """A rule: settings, and their effect on a document."""

    name: ClassVar[str]
    """Name in rule files."""
    shown: ClassVar[bool] = True
    """Whether excerpts of dropped documents may be shown."""
    languages: tuple[str, ...] = field(default=(), converter=as_tuple, validator=_language_codes)
    """Languages that the rule applies to, as ISO 639-1 codes; empty: all."""

    @abstractmethod
    def apply(self, text: Text, /) -> Outcome:
        """Keep, change or drop a document."""

    def check(self) -> None:
        """Check in advance that the libraries and files of the rule are available.

        Raises:
            SettingError: a library or a file is missing.
        """
        if self.languages:
            from ms_data.cleaning.languages import language_detector

            language_detector()

    def identity(self) -> str:
        """Return inputs of the result other than settings, such as a library version, or ""."""
        return library_version("Resiliparse") if self.languages else ""


def library_version(name: str) -> str:
    """Return the name and version of a library, which may affect results."""
    return f"{name} {version(name)}"


def fractions(*, count: int) -> Any:
    """Return a validator for a tuple of `count` numbers from 0 to 1."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        fits = isinstance(value, tuple) and len(value) == count
        if not fits or not all(type(item) in (int, float) and 0 <= item <= 1 for item in value):  # type: ignore[attr-defined]
            raise ConfigError(
                f"{attribute.name} must be {count} numbers from 0 to 1, got {short_repr(value)}"
            )

    return check


def texts(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Validate a tuple of non-empty strings."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{attribute.name} must be a list of strings, got {short_repr(value)}")


def over(setting: str, value: float, limit: float) -> Drop | None:
    """Return a Drop if a value exceeds its limit."""
    return Drop(setting, round(value, 6), limit) if value > limit else None


def under(setting: str, value: float, limit: float) -> Drop | None:
    """Return a Drop if a value is below its limit."""
    return Drop(setting, round(value, 6), limit) if value < limit else None
