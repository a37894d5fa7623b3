"""Finds personal data in text: each kind by its form, and by its check digits where it has any."""

import ipaddress
import re
from collections.abc import Callable, Iterator
from datetime import date
from typing import NamedTuple

from ms_data.cleaning.words import HAN

KINDS = ("mail", "telephone", "ip_address", "identity_number", "card_number")

_MAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][\w.+%-]{0,63}@(?:"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w-])|"
    rf"[{HAN}]{{1,20}}\.(?:[A-Za-z]{{2,24}}(?![\w-])|中国|公司|网络))",  # domains in Chinese
    re.ASCII,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", re.ASCII)
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:.])", re.ASCII)
_NUMBER = re.compile(r"(?<![\w.,@/#=:-])[+(]?\d[\d ().-]{5,30}[\dXx](?![\w-]|[.,]\d)", re.ASCII)
_CHINESE_MOBILE = re.compile(r"(?:\+?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}")
_CHINESE_LANDLINE = re.compile(r"\(?0(?:10|2\d|[3-9]\d{2})\)?[ -]?[2-8]\d{2,3}[ -]?\d{4}")
_INTERNATIONAL = re.compile(r"\+[1-9]\d{0,2}(?:[ .-]?\(?\d{1,4}\)?){2,6}")
_NORTH_AMERICAN = re.compile(r"(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[.-])[2-9]\d{2}[ .-]\d{4}")
_US_IDENTITY = re.compile(r"(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}")
_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_CHECKS = "10X98765432"


class PersonalItem(NamedTuple):
    """One piece of personal data."""

    kind: str
    start: int
    end: int


def find_personal_data(text: str, kinds: frozenset[str]) -> list[PersonalItem]:
    """Find the pieces of some kinds in order; none lies within another."""
    found: list[PersonalItem] = []
    if "mail" in kinds and "@" in text:
        found += [PersonalItem("mail", *one.span()) for one in _MAIL.finditer(text)]
    if "ip_address" in kinds:
        found += _addresses(text)
    if kinds.intersection(("telephone", "identity_number", "card_number")):
        for one in _NUMBER.finditer(text):
            kind, size = kind_of_number(one[0], kinds)
            if kind:
                found.append(PersonalItem(kind, one.start(), one.start() + size))
    found.sort(key=lambda one: (one.start, -one.end))
    kept: list[PersonalItem] = []
    for piece in found:
        if not kept or piece.start >= kept[-1].end:
            kept.append(piece)
    return kept


def kind_of_number(written: str, kinds: frozenset[str]) -> tuple[str, int]:
    """Tell what a number is, and how many of its characters belong to it; "" if it is nothing."""
    for kind, forms in _FORMS:
        if kind in kinds:
            for form in forms:
                size = form(written)
                if size:
                    return kind, size
    return "", 0


def is_chinese_identity(written: str) -> bool:
    """Return whether 18 characters are a GB 11643-1999 identity number, by date and check digit."""
    if len(written) != 18 or not written[:17].isdigit():
        return False
    try:
        born = date(int(written[6:10]), int(written[10:12]), int(written[12:14]))
    except ValueError:
        return False
    # Its last digit is by ISO 7064, MOD 11-2.
    total = sum(int(digit) * weight for digit, weight in zip(written, _WEIGHTS, strict=False))
    return born.year >= 1880 and written[17].upper() == _CHECKS[total % 11]


def passes_luhn(digits: str) -> bool:
    """Return whether the last digit checks the others by ISO/IEC 7812-1, annex B."""
    total = 0
    for at, digit in enumerate(reversed(digits)):
        number = int(digit) * (2 if at % 2 else 1)
        total += number - 9 if number > 9 else number
    return total % 10 == 0


def _is_card(digits: str) -> bool:
    """Return whether digits are a card's: an issuer that there is, a length, and a check digit."""
    size = len(digits)
    issued = (
        (digits[0] == "4" and size in (13, 16, 19))
        or ("51" <= digits[:2] <= "55" and size == 16)
        or ("2221" <= digits[:4] <= "2720" and size == 16)
        or (digits[:2] in ("34", "37") and size == 15)
        or (digits[:2] in ("36", "38") and size == 14)
        or ("3528" <= digits[:4] <= "3589" and size == 16)
        or (digits[:2] == "62" and 16 <= size <= 19)
        or ((digits[:4] == "6011" or digits[:2] == "65") and size == 16)
    )
    return issued and len(set(digits)) > 2 and passes_luhn(digits)


def _identity(written: str) -> int:
    if is_chinese_identity(written):
        return len(written)
    return len(written) if _US_IDENTITY.fullmatch(written) else 0


def _card(written: str) -> int:
    if not 13 <= len(written) <= 23:
        return 0
    plain = written.replace("-", " ")
    parts = plain.split(" ")
    grouped = all(3 <= len(part) <= 6 for part in parts[:-1]) and "" not in parts
    digits = "".join(parts)
    single = len(set(written) & set("- ")) < 2
    fits = digits.isdigit() and 13 <= len(digits) <= 19
    return len(written) if grouped and single and fits and _is_card(digits) else 0


def _telephone(written: str) -> int:
    forms = (_CHINESE_MOBILE, _CHINESE_LANDLINE, _NORTH_AMERICAN)
    if any(form.fullmatch(written) for form in forms):
        return len(written)
    if _INTERNATIONAL.fullmatch(written):
        digits = sum(map(str.isdigit, written))
        return len(written) if 9 <= digits <= 15 else 0
    return 0


_FORMS: tuple[tuple[str, tuple[Callable[[str], int], ...]], ...] = (
    ("identity_number", (_identity,)),
    ("card_number", (_card,)),
    ("telephone", (_telephone,)),
)


def _addresses(text: str) -> Iterator[PersonalItem]:
    """Find addresses of the public internet; those for examples and at home are nobody's."""
    for form, mark in ((_IPV4, "."), (_IPV6, ":")):
        if mark not in text:
            continue
        for one in form.finditer(text):
            try:
                address = ipaddress.ip_address(one[0])
            except ValueError:
                continue
            if address.is_global and len(one[0]) > 4:
                yield PersonalItem("ip_address", *one.span())
