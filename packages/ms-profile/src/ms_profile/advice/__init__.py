"""Rule-based advice; each rule cites spans as evidence and estimates the time to gain."""

from ms_profile.advice.finding import Evidence, Finding
from ms_profile.advice.rules import RULES, advise

__all__ = ["RULES", "Evidence", "Finding", "advise"]
