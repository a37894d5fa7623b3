"""Constants of the roofline: the fractions of its peak rates that a chip achieves."""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen

from ms_parallel.settings import number


def _frozen_mapping(values: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType(dict(values))


_fraction = number(minimum=1e-6, maximum=2.0)


@frozen(kw_only=True)
class Efficiency:
    """Constants of the roofline. The defaults are for measured rates, which need no correction."""

    products: Mapping[str, float] = field(factory=dict, converter=_frozen_mapping)
    """Fraction of the peak rate that large matrix products achieve, by dtype; 1 if not listed."""
    attention: float = field(default=1.0, validator=_fraction)
    """Fraction of the peak rate that fused attention achieves in the forward with head_dim 128."""
    attention_backward: float = field(default=1.0, validator=_fraction)
    """The same for its backward."""
    memory: float = field(default=1.0, validator=_fraction)
    """Fraction of the memory bandwidth that elementwise operators achieve."""
    traffic: float = field(default=0.0, validator=number(minimum=0.0, maximum=4.0))
    """Fraction of a matrix product's own memory traffic that its arithmetic does not hide; it makes
    small products slow."""
    node: float = field(default=1.0, validator=_fraction)
    """Fraction of the intra-node bandwidth that collectives achieve."""
    network: float = field(default=1.0, validator=_fraction)
    """The same between nodes."""
    hidden: float = field(default=1.0, validator=number(minimum=0.0, maximum=1.0))
    """Fraction of the overlapped communication that costs no time."""
    step_ms: float = field(default=0.0, validator=number(minimum=0.0, maximum=1e6))
    """Fixed milliseconds per step: launching the optimizer, checks."""
    waiting: float = field(default=0.0, validator=number(minimum=0.0, maximum=1.0))
    """Fraction by which a step gets longer with each doubling of the nodes, as devices wait for the
    slowest one."""

    def product_share(self, dtype: str) -> float:
        """Fraction of a dtype's peak rate that matrix products achieve."""
        return self.products.get(dtype, 1.0)
