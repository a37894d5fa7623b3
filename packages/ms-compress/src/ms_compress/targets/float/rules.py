"""A plain folder rounds nothing."""

from ms_compress.quantisation.scheme import Scheme

SCHEMES: tuple[Scheme, ...] = ()
GROUPED: dict[str, Scheme] = {}
