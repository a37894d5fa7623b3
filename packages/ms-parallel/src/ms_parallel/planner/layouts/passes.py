"""What a microbatch takes in each layer: a Protocol, and a roofline from a cluster's figures."""

from functools import lru_cache
from typing import Protocol

from attrs import frozen

from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.sizes import LayerSizes, ModelSizes
from ms_parallel.planner.roofline.collectives import collective_s

REACHED = 0.55
"""Share of a data sheet's rate that matrix products of training reach, and its bandwidth likewise;
rates that were measured are taken as they are."""
FLOAT32_BYTES = 4
TOUCHED = 60
"""Bytes that a layer reads and writes beside its matrix products, for each position and hidden unit
in half precision: norms, rotations, gates and residuals, forwards."""
AGAIN = {"none": 0.0, "selective": 0.1, "attention": 0.35, "full": 1.0}
"""Share of a forward that the backward computes again."""


@frozen(kw_only=True)
class PassSeconds:
    """Seconds of one microbatch on one rank, collectives of tensor, context and expert ranks in."""

    forward: float = 0.0
    backward_input: float = 0.0
    """With what is computed again."""
    backward_weight: float = 0.0
    travel: float = 0.0
    """That part of all three which collectives take."""

    @property
    def all(self) -> float:
        """Forwards and backwards."""
        return self.forward + self.backward_input + self.backward_weight

    def times(self, count: int) -> "PassSeconds":
        """Return the same seconds, so many times as long."""
        return PassSeconds(
            forward=count * self.forward,
            backward_input=count * self.backward_input,
            backward_weight=count * self.backward_weight,
            travel=count * self.travel,
        )

    def __add__(self, other: "PassSeconds") -> "PassSeconds":
        return PassSeconds(
            forward=self.forward + other.forward,
            backward_input=self.backward_input + other.backward_input,
            backward_weight=self.backward_weight + other.backward_weight,
            travel=self.travel + other.travel,
        )


@frozen(kw_only=True)
class ModelSeconds:
    """What a microbatch takes in a whole model that is on one pipeline rank."""

    layers: tuple[PassSeconds, ...]
    first: PassSeconds
    """Seconds of the embedding."""
    last: PassSeconds
    """Seconds of the head and the loss."""

    @property
    def all(self) -> float:
        """Forwards and backwards of all."""
        return self.sum(range(len(self.layers))).all

    def sum(self, layers: range) -> PassSeconds:
        """Add up some neighboring layers, with what lies before the first and behind the last."""
        chosen = self.layers[layers.start : layers.stop]
        one = chosen[0]
        if chosen.count(one) == len(chosen):
            found = one.times(len(chosen))
        else:
            found = sum(chosen[1:], one)
        found += self.first if layers.start == 0 else PassSeconds()
        return found + (self.last if layers.stop == len(self.layers) else PassSeconds())


@frozen(kw_only=True)
class OwnAndTravel:
    """Seconds of a rank's own work, and of the collectives that it waits for."""

    own: float = 0.0
    travel: float = 0.0

    def of(self, ends: "OwnAndTravel", layers: int) -> "OwnAndTravel":
        """Add up those of so many layers, and of what stands beside them once."""
        return OwnAndTravel(
            own=layers * self.own + ends.own, travel=layers * self.travel + ends.travel
        )


@frozen(kw_only=True)
class StepCosts:
    """What a step takes beside the passes of layers, as it was measured under a sharding."""

    pass_layer: OwnAndTravel
    """For each layer and each microbatch: weights that are gathered and freed, sums of gradients,
    and the work of asking for them."""
    pass_ends: OwnAndTravel
    """For each stage and each microbatch."""
    step_layer: OwnAndTravel
    """For each layer, once a step: what is left of these, the norm, the optimizer."""
    step_ends: OwnAndTravel
    """For each rank, once a step."""


class PassTimes(Protocol):
    """Whatever says how long a model's layers take."""

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Return the seconds of one microbatch."""
        ...

    def update(self, weights: int) -> float:
        """Return the seconds in which the optimizer changes so many weights of a rank."""
        ...

    def copies(self, size_bytes: float) -> float:
        """Return the seconds to put what is gathered or summed in its place in a rank's memory."""
        ...

    def costs(self, candidate: Candidate) -> StepCosts | None:
        """Return what a step takes beside its passes; None where it is not measured."""
        ...


class SheetTimes:
    """Rates and links of a cluster, and counts of operations, bytes and messages.

    Args:
        sizes: of the model.
        cluster: it is on.
        length: tokens of a row.
        dtype: in which matrix products are computed.
    """

    def __init__(self, sizes: ModelSizes, cluster: Cluster, length: int, dtype: str) -> None:
        self.sizes, self.cluster, self.length = sizes, cluster, length
        self.width = 4 if dtype == "float32" else 2
        reached = 1.0 if cluster.measured else REACHED
        self.rate = cluster.tflops(dtype) * 1e12 * reached
        self.bandwidth = cluster.memory_bandwidth_gb_per_s * 1e9 * reached
        self.passes = lru_cache(maxsize=None)(self._passes)  # type: ignore[method-assign]

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Return the seconds of one microbatch."""
        return self._passes(split, recompute)

    def update(self, weights: int) -> float:
        """Return the seconds to read and write weights, gradients and two moments in an update."""
        return weights * 7 * FLOAT32_BYTES / self.bandwidth

    def copies(self, size_bytes: float) -> float:
        """Return the seconds to read and write so many bytes where nothing hides it."""
        if self.cluster.cores_per_node is None:
            return 0.0
        return 2 * size_bytes / self.bandwidth

    def costs(self, candidate: Candidate) -> None:
        """Return None, as these times follow from sizes."""

    def _passes(self, split: Split, recompute: str) -> ModelSeconds:
        known: dict[LayerSizes, PassSeconds] = {}
        for layer in self.sizes.layers:
            if layer not in known:
                known[layer] = self._layer(layer, split, recompute)
        return ModelSeconds(
            layers=tuple(known[layer] for layer in self.sizes.layers),
            first=self._first(split),
            last=self._last(split),
        )

    def _positions(self, split: Split) -> float:
        """Count the positions in a rank's rows, before the tensor axis."""
        return split.rows * self.length / split.layout.context

    def _layer(self, layer: LayerSizes, split: Split, recompute: str) -> PassSeconds:
        sizes, layout = self.sizes, split.layout
        positions = self._positions(split)
        active = float(layer.split + layer.whole)
        active += layer.experts * sizes.chosen / sizes.experts if sizes.experts else 0
        products = 2 * active * positions / layout.tensor / self.rate
        # Of a causal row each position sees half of it.
        seen = 2 * 2 * positions * self.length / 2 * sizes.attention / layout.tensor / self.rate
        touched = TOUCHED * self.width / 2 * positions * sizes.hidden / layout.tensor
        plain = touched / self.bandwidth
        travel = self._travel(split, bool(layer.experts))
        forward = products + seen + plain + travel
        again = AGAIN[recompute] * forward
        return PassSeconds(
            forward=forward,
            backward_input=products + 2 * seen + 2 * plain + travel + again,
            backward_weight=products,
            travel=(2 + AGAIN[recompute]) * travel,
        )

    def _travel(self, split: Split, experts: bool) -> float:
        """Add up the seconds of a layer's collectives forwards; those backwards are as many."""
        sizes, layout, width = self.sizes, split.layout, self.width
        positions = self._positions(split)
        whole = positions * sizes.hidden * width
        seconds = 0.0
        if layout.tensor > 1:  # before and behind attention and the feed-forward
            gather = collective_s(self.cluster, "all_gather", whole, layout.tensor)
            seconds += 2 * gather + 2 * collective_s(
                self.cluster, "reduce_scatter", whole, layout.tensor
            )
        if layout.context > 1:
            keys = split.rows * self.length * sizes.keys / layout.tensor * width
            seconds += collective_s(self.cluster, "all_gather", keys, layout.context, layout.tensor)
        if layout.expert > 1 and experts:
            rows = whole * sizes.chosen / layout.tensor
            seconds += 2 * collective_s(
                self.cluster, "all_to_all", rows, layout.expert, layout.tensor
            )
        return seconds

    def _first(self, split: Split) -> PassSeconds:
        read = self._positions(split) * self.sizes.hidden * FLOAT32_BYTES / self.bandwidth
        return PassSeconds(forward=read, backward_weight=2 * read)

    def _last(self, split: Split) -> PassSeconds:
        logits = self._positions(split) * self.sizes.vocabulary / split.layout.tensor
        products = 2 * logits * self.sizes.hidden / self.rate
        loss = 3 * logits * FLOAT32_BYTES / self.bandwidth
        return PassSeconds(
            forward=products + loss, backward_input=products + loss, backward_weight=products
        )
