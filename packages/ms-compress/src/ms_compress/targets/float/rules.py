"""Plain folders have no quantization schemes."""

from ms_compress.quantisation.scheme import Scheme

SCHEMES: tuple[Scheme, ...] = ()
GROUPED: dict[str, Scheme] = {}
