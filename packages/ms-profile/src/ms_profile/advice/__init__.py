"""Advice by rules, one a file, each of which cites its events and estimates what is to gain."""

from ms_profile.advice.finding import Evidence, Finding
from ms_profile.advice.rules import RULES, advise

__all__ = ["RULES", "Evidence", "Finding", "advise"]
