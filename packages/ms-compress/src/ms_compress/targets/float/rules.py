"""A plain folder rounds nothing."""

from ms_compress.quantisation.scheme import Scheme

__all__ = ["GROUPED", "SCHEMES"]

SCHEMES: tuple[Scheme, ...] = ()
GROUPED: dict[str, Scheme] = {}
