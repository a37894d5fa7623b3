"""Which shares of its figures a chip reaches: the constants of the roofline."""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen

from ms_parallel.settings import number


def _kept(values: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType(dict(values))


_share = number(minimum=1e-6, maximum=2.0)


@frozen(kw_only=True)
class Efficiency:
    """Constants of the roofline; 1 where rates are measured ones."""

    products: Mapping[str, float] = field(factory=dict, converter=_kept)
    """Share of the peak rate of a dtype that large matrix products reach; 1 where none is named."""
    attention: float = field(default=1.0, validator=_share)
    """Share of the peak rate that the forward of fused attention reaches with heads of 128."""
    attention_backward: float = field(default=1.0, validator=_share)
    """The same of its backward."""
    memory: float = field(default=1.0, validator=_share)
    """Share of the memory's bandwidth that element-wise steps reach."""
    traffic: float = field(default=0.0, validator=number(minimum=0.0, maximum=4.0))
    """Share of a product's own reads and writes that is not hidden behind its operations: what
    makes small products slow."""
    node: float = field(default=1.0, validator=_share)
    """Share of the bandwidth inside a node that collectives reach."""
    network: float = field(default=1.0, validator=_share)
    """The same between nodes."""
    hidden: float = field(default=1.0, validator=number(minimum=0.0, maximum=1.0))
    """Share of communication issued beside computation that costs no time."""
    step_ms: float = field(default=0.0, validator=number(minimum=0.0, maximum=1e6))
    """Milliseconds of a step in which nothing else is done: the optimizer's launches, checks."""
    waiting: float = field(default=0.0, validator=number(minimum=0.0, maximum=1.0))
    """Share by which a step grows with each doubling of the nodes: devices that wait for the
    slowest one."""

    def product_share(self, dtype: str) -> float:
        """Share of a dtype's peak rate that products reach."""
        return self.products.get(dtype, 1.0)
