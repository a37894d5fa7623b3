"""Masks personal data, or drops documents that contain some."""

from collections import Counter

from attrs import field, frozen

from ms_data.cleaning.personal import PERSONAL_DATA_TYPES, find_personal_data
from ms_data.cleaning.rule import Change, Cut, Drop, Outcome, Rule
from ms_data.cleaning.text import Text
from ms_data.settings import flag, one_of, text


@frozen(kw_only=True)
class PersonalData(Rule):
    """Masks email addresses, telephone, public IP, identity and card numbers, also Chinese ones.

    Chinese identity numbers are checked by ISO 7064 (GB 11643-1999), card numbers by ISO/IEC
    7812-1.
    """

    name = "personal_data"
    shown = False

    action: str = field(default="mask", validator=one_of("mask", "drop"))
    """Mask the data or drop the document: mask or drop."""
    mail: bool = field(default=True, validator=flag)
    """Detect email addresses."""
    telephone: bool = field(default=True, validator=flag)
    """Detect telephone numbers: international, Chinese and North American formats."""
    ip_address: bool = field(default=True, validator=flag)
    """Detect public IP addresses."""
    identity_number: bool = field(default=True, validator=flag)
    """Detect Chinese identity numbers and US social security numbers."""
    card_number: bool = field(default=True, validator=flag)
    """Detect payment card numbers."""
    mask: str = field(default="<{kind}>", validator=text())
    """Replacement for the data; {kind} is the type, such as mail."""

    def apply(self, text: Text, /) -> Outcome:
        """Mask or drop personal data; excerpts never show it."""
        types = frozenset(name for name in PERSONAL_DATA_TYPES if getattr(self, name))
        items = find_personal_data(text.text, types)
        if not items:
            return None
        counts, sizes = Counter(item.kind for item in items), Counter[str]()
        if self.action == "drop":
            name, count = counts.most_common(1)[0]
            return Drop(name, count, 0)
        parts, end = [], 0
        for item in items:
            parts += [text.text[end : item.start], self.mask.replace("{kind}", item.kind)]
            sizes[item.kind] += item.end - item.start
            end = item.end
        changed = "".join((*parts, text.text[end:]))
        return Change(
            changed, tuple(Cut(name, count, sizes[name]) for name, count in sorted(counts.items()))
        )


RULE = PersonalData
