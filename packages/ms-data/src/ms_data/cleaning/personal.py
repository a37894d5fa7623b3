"""Finds personal data in text, by its format and its check digits."""

import ipaddress
import re
from collections.abc import Callable, Iterator
from datetime import date
from typing import NamedTuple

from ms_data.cleaning.words import HAN

PERSONAL_DATA_TYPES = ("mail", "telephone", "ip_address", "identity_number", "card_number")

_MAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][\w.+%-]{0,63}@(?:"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w-])|"
    rf"[{HAN}]{{1,20}}\.(?:[A-Za-z]{{2,24}}(?![\w-])|中国|公司|网络))",  # domains in Chinese
    re.ASCII,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", re.ASCII)
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:.])", re.ASCII)
# Anything that may be a number of these types; `classify_number` decides.
_NUMBER = re.compile(r"(?<![\w.,@/#=:-])[+(]?\d[\d ().-]{5,30}[\dXx](?![\w-]|[.,]\d)", re.ASCII)
_CHINESE_MOBILE = re.compile(r"(?:\+?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}")
_CHINESE_LANDLINE = re.compile(r"\(?0(?:10|2\d|[3-9]\d{2})\)?[ -]?[2-8]\d{2,3}[ -]?\d{4}")
_INTERNATIONAL = re.compile(r"\+[1-9]\d{0,2}(?:[ .-]?\(?\d{1,4}\)?){2,6}")
_NORTH_AMERICAN = re.compile(r"(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[.-])[2-9]\d{2}[ .-]\d{4}")
_US_IDENTITY = re.compile(r"(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}")
_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)  # powers of 2 modulo 11
_CHECKS = "10X98765432"  # check digit by the weighted sum modulo 11


class PersonalItem(NamedTuple):
    """A piece of personal data."""

    kind: str
    start: int
    end: int


def find_personal_data(text: str, types: frozenset[str]) -> list[PersonalItem]:
    """Return the non-overlapping items of the given types, in order."""
    items: list[PersonalItem] = []
    if "mail" in types and "@" in text:
        items += [PersonalItem("mail", *match.span()) for match in _MAIL.finditer(text)]
    if "ip_address" in types:
        items += _addresses(text)
    if types.intersection(("telephone", "identity_number", "card_number")):
        for match in _NUMBER.finditer(text):
            number_type, size = classify_number(match[0], types)
            if number_type:
                items.append(PersonalItem(number_type, match.start(), match.start() + size))
    items.sort(key=lambda item: (item.start, -item.end))  # the longer of two overlapping items wins
    disjoint: list[PersonalItem] = []
    for item in items:
        if not disjoint or item.start >= disjoint[-1].end:
            disjoint.append(item)
    return disjoint


def classify_number(number: str, types: frozenset[str]) -> tuple[str, int]:
    """Return the type of a number and the length of its match; "" and 0 without a match."""
    for number_type, matchers in _MATCHERS:
        if number_type in types:
            for matcher in matchers:
                size = matcher(number)
                if size:
                    return number_type, size
    return "", 0


def is_chinese_identity(number: str) -> bool:
    """Return whether a text is a GB 11643-1999 identity number: date and check digit are valid."""
    if len(number) != 18 or not number[:17].isdigit():
        return False
    try:
        birth_date = date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    # The check digit follows ISO 7064, MOD 11-2.
    total = sum(int(digit) * weight for digit, weight in zip(number, _WEIGHTS, strict=False))
    return birth_date.year >= 1880 and number[17].upper() == _CHECKS[total % 11]


def passes_luhn(digits: str) -> bool:
    """Return whether the last digit is a valid check digit by ISO/IEC 7812-1, annex B."""
    total = 0
    for index, digit in enumerate(reversed(digits)):
        number = int(digit) * (2 if index % 2 else 1)
        total += number - 9 if number > 9 else number  # digit sum of a doubled digit
    return total % 10 == 0


def _is_card(digits: str) -> bool:
    """Return whether digits are a card number: known issuer, valid length and check digit."""
    size = len(digits)
    issued = (
        (digits[0] == "4" and size in (13, 16, 19))  # Visa
        or ("51" <= digits[:2] <= "55" and size == 16)  # Mastercard
        or ("2221" <= digits[:4] <= "2720" and size == 16)
        or (digits[:2] in ("34", "37") and size == 15)  # American Express
        or (digits[:2] in ("36", "38") and size == 14)  # Diners Club
        or ("3528" <= digits[:4] <= "3589" and size == 16)  # JCB
        or (digits[:2] == "62" and 16 <= size <= 19)  # UnionPay
        or ((digits[:4] == "6011" or digits[:2] == "65") and size == 16)  # Discover
    )
    # Few different digits: a placeholder such as 4444 4444 4444 4448.
    return issued and len(set(digits)) > 2 and passes_luhn(digits)


def _identity(number: str) -> int:
    if is_chinese_identity(number):
        return len(number)
    return len(number) if _US_IDENTITY.fullmatch(number) else 0


def _card(number: str) -> int:
    if not 13 <= len(number) <= 23:
        return 0
    spaced = number.replace("-", " ")
    parts = spaced.split(" ")
    grouped = all(3 <= len(part) <= 6 for part in parts[:-1]) and "" not in parts
    digits = "".join(parts)
    single = len(set(number) & set("- ")) < 2
    valid_length = digits.isdigit() and 13 <= len(digits) <= 19
    return len(number) if grouped and single and valid_length and _is_card(digits) else 0


def _telephone(number: str) -> int:
    patterns = (_CHINESE_MOBILE, _CHINESE_LANDLINE, _NORTH_AMERICAN)
    if any(pattern.fullmatch(number) for pattern in patterns):
        return len(number)
    if _INTERNATIONAL.fullmatch(number):
        digits = sum(map(str.isdigit, number))
        return len(number) if 9 <= digits <= 15 else 0  # ITU-T E.164 allows 15 digits
    return 0


_MATCHERS: tuple[tuple[str, tuple[Callable[[str], int], ...]], ...] = (
    ("identity_number", (_identity,)),
    ("card_number", (_card,)),
    ("telephone", (_telephone,)),
)


def _addresses(text: str) -> Iterator[PersonalItem]:
    """Yield the public IP addresses in a text, without private and documentation addresses."""
    for pattern, separator in ((_IPV4, "."), (_IPV6, ":")):
        if separator not in text:
            continue
        for match in pattern.finditer(text):
            try:
                address = ipaddress.ip_address(match[0])
            except ValueError:
                continue
            if address.is_global and len(match[0]) > 4:  # `::1` and the like are too short to tell
                yield PersonalItem("ip_address", *match.span())
