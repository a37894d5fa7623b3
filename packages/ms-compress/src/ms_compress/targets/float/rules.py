"""Plain folders have no quantization schemes."""

from ms_compress.quantization.scheme import Scheme

SCHEMES: tuple[Scheme, ...] = ()
GROUPED: dict[str, Scheme] = {}
