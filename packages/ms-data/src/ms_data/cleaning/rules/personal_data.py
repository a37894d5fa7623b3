"""Masks personal data, or drops the documents that hold some."""

from collections import Counter

from attrs import field, frozen

from ms_data.cleaning.personal import KINDS, find_personal_data
from ms_data.cleaning.rule import Change, Cut, Drop, Outcome, Rule
from ms_data.cleaning.text import Text
from ms_data.settings import flag, one_of, text


@frozen(kw_only=True)
class PersonalData(Rule):
    """Masks mail addresses, telephone, public IP, identity and card numbers, Chinese forms too.

    Identity numbers of China are checked by ISO 7064 (GB 11643-1999), cards by ISO/IEC 7812-1.
    """

    name = "personal_data"
    shown = False

    action: str = field(default="mask", validator=one_of("mask", "drop"))
    """Whether data is masked, or its document dropped: mask or drop."""
    mail: bool = field(default=True, validator=flag)
    """Look for mail addresses."""
    telephone: bool = field(default=True, validator=flag)
    """Look for telephone numbers: international, Chinese and North American forms."""
    ip_address: bool = field(default=True, validator=flag)
    """Look for IP addresses of the public internet."""
    identity_number: bool = field(default=True, validator=flag)
    """Look for identity numbers of China, and social security numbers of the United States."""
    card_number: bool = field(default=True, validator=flag)
    """Look for numbers of payment cards."""
    mask: str = field(default="<{kind}>", validator=text())
    """What stands in place of the data; {kind} is its kind, such as mail."""

    def apply(self, text: Text, /) -> Outcome:
        """Mask or drop what is found; it is nowhere shown."""
        kinds = frozenset(kind for kind in KINDS if getattr(self, kind))
        found = find_personal_data(text.text, kinds)
        if not found:
            return None
        counts, sizes = Counter(one.kind for one in found), Counter[str]()
        if self.action == "drop":
            kind, count = counts.most_common(1)[0]
            return Drop(kind, count, 0)
        parts, end = [], 0
        for one in found:
            parts += [text.text[end : one.start], self.mask.replace("{kind}", one.kind)]
            sizes[one.kind] += one.end - one.start
            end = one.end
        changed = "".join((*parts, text.text[end:]))
        return Change(
            changed, tuple(Cut(kind, count, sizes[kind]) for kind, count in sorted(counts.items()))
        )


RULE = PersonalData
