"""Times of a microbatch by layer: a Protocol, and a roofline model from a cluster's rates."""

from functools import lru_cache
from typing import Protocol

from attrs import frozen

from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.sizes import LayerSizes, ModelSizes
from ms_parallel.planner.roofline.collectives import collective_s

DATASHEET_FRACTION = 0.55
"""Fraction of a data sheet's rates that matrix products and memory accesses reach in training;
measured rates are not reduced."""
FLOAT32_BYTES = 4
ELEMENTWISE_BYTES = 60
"""Bytes read and written per position and hidden unit in the forward of a layer besides its matrix
products, in half precision: norms, rotary embeddings, gates and residuals."""
RECOMPUTED = {"none": 0.0, "selective": 0.1, "attention": 0.35, "full": 1.0}
"""Fraction of a forward that the backward recomputes."""


@frozen(kw_only=True)
class PassSeconds:
    """Seconds of a microbatch on a rank, including tensor, context and expert communication."""

    forward: float = 0.0
    backward_input: float = 0.0
    """Includes recomputation."""
    backward_weight: float = 0.0
    communication: float = 0.0
    """Communication time within all three."""

    @property
    def all(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight

    def times(self, count: int) -> "PassSeconds":
        """Multiply all times by `count`."""
        return PassSeconds(
            forward=count * self.forward,
            backward_input=count * self.backward_input,
            backward_weight=count * self.backward_weight,
            communication=count * self.communication,
        )

    def __add__(self, other: "PassSeconds") -> "PassSeconds":
        return PassSeconds(
            forward=self.forward + other.forward,
            backward_input=self.backward_input + other.backward_input,
            backward_weight=self.backward_weight + other.backward_weight,
            communication=self.communication + other.communication,
        )


@frozen(kw_only=True)
class ModelSeconds:
    """Times of a microbatch in a model that is on one pipeline rank."""

    layers: tuple[PassSeconds, ...]
    first: PassSeconds
    """Seconds of the embedding."""
    last: PassSeconds
    """Seconds of the head and the loss."""

    @property
    def all(self) -> float:
        """Forward and backward of the model."""
        return self.sum(range(len(self.layers))).all

    def sum(self, layers: range) -> PassSeconds:
        """Total of consecutive layers, including the embedding or head if they are at an end."""
        passes = self.layers[layers.start : layers.stop]
        first = passes[0]
        if passes.count(first) == len(passes):
            total = first.times(len(passes))
        else:
            total = sum(passes[1:], first)
        total += self.first if layers.start == 0 else PassSeconds()
        return total + (self.last if layers.stop == len(self.layers) else PassSeconds())


@frozen(kw_only=True)
class RankSeconds:
    """Seconds of a rank's computation, and of the communication that it waits for."""

    compute: float = 0.0
    communication: float = 0.0

    def of(self, ends: "RankSeconds", layers: int) -> "RankSeconds":
        """Total of several layers, and of parts outside of layers."""
        return RankSeconds(
            compute=layers * self.compute + ends.compute,
            communication=layers * self.communication + ends.communication,
        )


@frozen(kw_only=True)
class StepCosts:
    """Measured costs of a step besides the passes of its layers, under a sharding."""

    pass_layer: RankSeconds
    """Per layer and microbatch: gathering and freeing weights, reducing gradients, and launching
    these."""
    pass_ends: RankSeconds
    """Per stage and microbatch."""
    step_layer: RankSeconds
    """Per layer and step: the remaining reductions, the gradient norm, the optimizer."""
    step_ends: RankSeconds
    """Per rank and step."""


class TimeModel(Protocol):
    """Predicts or measures the times of a model's layers."""

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Seconds of one microbatch."""
        ...

    def optimizer_seconds(self, weights: int) -> float:
        """Seconds of the optimizer for a number of weights on a rank."""
        ...

    def copy_seconds(self, size_bytes: float) -> float:
        """Seconds to copy gathered or reduced data to its destination in a rank's memory."""
        ...

    def step_costs(self, candidate: Candidate) -> StepCosts | None:
        """Costs of a step besides its passes; None if not measured."""
        ...


class DatasheetTimes:
    """Roofline model from a cluster's rates and links and a model's operations, bytes and messages.

    Args:
        sizes: sizes of the model.
        cluster: the cluster.
        length: tokens per row.
        dtype: dtype of matrix products.
    """

    def __init__(self, sizes: ModelSizes, cluster: Cluster, length: int, dtype: str) -> None:
        self.sizes, self.cluster, self.length = sizes, cluster, length
        self.width = 4 if dtype == "float32" else 2
        fraction = 1.0 if cluster.measured else DATASHEET_FRACTION
        self.rate = cluster.tflops(dtype) * 1e12 * fraction
        self.bandwidth = cluster.memory_bandwidth_gb_per_s * 1e9 * fraction
        self.passes = lru_cache(maxsize=None)(self._passes)  # type: ignore[method-assign]

    def passes(self, split: Split, recompute: str) -> ModelSeconds:
        """Seconds of one microbatch."""
        return self._passes(split, recompute)

    def optimizer_seconds(self, weights: int) -> float:
        """Seconds to read and write weights, gradients and two moments."""
        # Read gradient, weight and two moments; write weight and two moments.
        return weights * 7 * FLOAT32_BYTES / self.bandwidth

    def copy_seconds(self, size_bytes: float) -> float:
        """Seconds to read and write the bytes, if computation does not hide that."""
        if self.cluster.cores_per_node is None:
            return 0.0
        return 2 * size_bytes / self.bandwidth

    def step_costs(self, candidate: Candidate) -> None:
        """Return None, as these times are predicted from sizes."""

    def _passes(self, split: Split, recompute: str) -> ModelSeconds:
        seconds: dict[LayerSizes, PassSeconds] = {}
        for layer in self.sizes.layers:
            if layer not in seconds:
                seconds[layer] = self._layer(layer, split, recompute)
        return ModelSeconds(
            layers=tuple(seconds[layer] for layer in self.sizes.layers),
            first=self._first(split),
            last=self._last(split),
        )

    def _positions(self, split: Split) -> float:
        """Positions in a rank's rows, before tensor parallelism."""
        return split.rows * self.length / split.layout.context

    def _layer(self, layer: LayerSizes, split: Split, recompute: str) -> PassSeconds:
        sizes, layout = self.sizes, split.layout
        positions = self._positions(split)
        active = float(layer.split + layer.replicated)
        active += layer.experts * sizes.experts_per_token / sizes.experts if sizes.experts else 0
        # 2 operations per active weight and position; the backward has two such products.
        products = 2 * active * positions / layout.tensor / self.rate
        # Scores and weighted values, 2 operations each; with a causal mask a position attends to
        # half of its row on average.
        attended = 2 * 2 * positions * self.length / 2 * sizes.attention / layout.tensor / self.rate
        elementwise = ELEMENTWISE_BYTES * self.width / 2 * positions * sizes.hidden / layout.tensor
        elementwise_s = elementwise / self.bandwidth
        communication = self._communication(split, bool(layer.experts))
        forward = products + attended + elementwise_s + communication
        recomputed = RECOMPUTED[recompute] * forward
        return PassSeconds(
            forward=forward,
            backward_input=products + 2 * attended + 2 * elementwise_s + communication + recomputed,
            backward_weight=products,
            communication=(2 + RECOMPUTED[recompute]) * communication,
        )

    def _communication(self, split: Split, experts: bool) -> float:
        """Communication time of a layer's forward; the backward takes as long."""
        sizes, layout, width = self.sizes, split.layout, self.width
        positions = self._positions(split)
        size_bytes = positions * sizes.hidden * width
        seconds = 0.0
        if layout.tensor > 1:  # before and after attention, and before and after the MLP
            gather = collective_s(self.cluster, "all_gather", size_bytes, layout.tensor)
            seconds += 2 * gather + 2 * collective_s(
                self.cluster, "reduce_scatter", size_bytes, layout.tensor
            )
        if layout.context > 1:
            # Keys and values of all positions.
            keys = split.rows * self.length * sizes.keys / layout.tensor * width
            seconds += collective_s(self.cluster, "all_gather", keys, layout.context, layout.tensor)
        if layout.expert > 1 and experts:
            # Dispatch and combine; each token is sent once per selected expert.
            rows = size_bytes * sizes.experts_per_token / layout.tensor
            seconds += 2 * collective_s(
                self.cluster, "all_to_all", rows, layout.expert, layout.tensor
            )
        return seconds

    def _first(self, split: Split) -> PassSeconds:
        read = self._positions(split) * self.sizes.hidden * FLOAT32_BYTES / self.bandwidth
        # The backward reads and writes the rows of the gradient.
        return PassSeconds(forward=read, backward_weight=2 * read)

    def _last(self, split: Split) -> PassSeconds:
        logits = self._positions(split) * self.sizes.vocabulary / split.layout.tensor
        products = 2 * logits * self.sizes.hidden / self.rate
        # Three passes over float32 logits, in the forward and again in the backward.
        loss = 3 * logits * FLOAT32_BYTES / self.bandwidth
        return PassSeconds(
            forward=products + loss, backward_input=products + loss, backward_weight=products
        )
