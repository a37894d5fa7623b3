"""The schemes of all targets by name: each folder of this room states its own in `rules.py`.

Reading them imports no torch, so that a run file that names a scheme is read at once.
"""

from importlib import import_module
from pkgutil import iter_modules

from attrs import evolve

import ms_compress.targets
from ms_compress.errors import SchemeError
from ms_compress.quantisation.scheme import Scheme
from ms_compress.settings import nearest

TARGETS = tuple(each.name for each in iter_modules(ms_compress.targets.__path__) if each.ispkg)
"""The folders of this room; a new target is one more of them."""
_RULES = [import_module(f"ms_compress.targets.{name}.rules") for name in TARGETS]
_SCHEMES: dict[str, Scheme] = {each.name: each for rules in _RULES for each in rules.SCHEMES}
_GROUPED: dict[str, Scheme] = {
    stem: each for rules in _RULES for stem, each in rules.GROUPED.items()
}
NAMES = tuple(_SCHEMES)
"""The schemes by name; `ct.int4_g64` and `ort.matmulnbits_g128` and the like are known too."""


def scheme(name: str | Scheme) -> Scheme:
    """Return the scheme of a name such as `"gguf.q4_0"`; a scheme is returned as it is.

    Raises:
        SchemeError: there is none, or its target takes no such group; the message gives the
            nearest name, or the groups that fit.
    """
    if isinstance(name, Scheme):
        return name
    if name in _SCHEMES:
        return _SCHEMES[name]
    stem, _, group = name.rpartition("_g")
    if stem in _GROUPED and group.isdecimal():
        return evolve(_GROUPED[stem], name=name, group=int(group))
    raise SchemeError(f"there is no scheme {name!r}; {nearest(name, NAMES)}")
