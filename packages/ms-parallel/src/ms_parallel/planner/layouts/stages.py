"""Which layers each pipeline rank has, and the weights of them."""

from attrs import define, field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.layouts.candidate import Candidate
from ms_parallel.planner.layouts.pipeline import stage_ranks
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.split.stages import cut_layers

Stage = tuple[int, range]
"""Its number and its layers."""


@frozen(kw_only=True)
class RankWeights:
    """Parameters of a rank."""

    own: int
    """Before they are sharded."""
    held: int
    """Its share."""


@define
class Stages:
    """The stages of a model under every schedule, each cut once.

    Args:
        sizes: of the model.
    """

    sizes: ModelSizes
    cut: dict[tuple[str, int], list[list[Stage]]] = field(factory=dict)
    owned: dict[tuple[str, int, int, int], list[tuple[int, int]]] = field(factory=dict)

    def of(self, schedule: str, ranks: int) -> list[list[Stage]]:
        """Return the stages of each pipeline rank.

        Raises:
            LayoutError: there are more stages than places to cut.
        """
        if (schedule, ranks) not in self.cut:
            home = stage_ranks(schedule, ranks)
            layers = cut_layers(len(self.sizes.layers), len(home), self.sizes.cuts)
            found: list[list[Stage]] = [[] for _ in range(ranks)]
            for stage, rank in enumerate(home):
                found[rank].append((stage, layers[stage]))
            self.cut[schedule, ranks] = found
        return self.cut[schedule, ranks]

    def weights(self, candidate: Candidate) -> list[RankWeights]:
        """Count the parameters of each pipeline rank."""
        layout = candidate.layout
        shards = 1 if candidate.sharding == "replicate" else layout.shards
        return [
            RankWeights(
                own=dense + experts,
                held=-(-dense // shards) + -(-experts // max(1, shards // layout.expert)),
            )
            for dense, experts in self._owned(candidate.schedule, layout)
        ]

    def _owned(self, schedule: str, layout: Layout) -> list[tuple[int, int]]:
        """Count the parameters of each rank: those apart from experts, and its experts'."""
        key = (schedule, layout.pipeline, layout.tensor, layout.expert)
        if key not in self.owned:
            self.owned[key] = [
                self._owned_by(stages, layout) for stages in self.of(schedule, layout.pipeline)
            ]
        return self.owned[key]

    def _owned_by(self, stages: list[Stage], layout: Layout) -> tuple[int, int]:
        sizes = self.sizes
        parts = [sizes.layers[n] for _, layers in stages for n in layers]
        first = any(layers.start == 0 for _, layers in stages)
        last = any(layers.stop == len(sizes.layers) for _, layers in stages)
        parts += [sizes.first] if first else []
        parts += [sizes.last] if last and not (first and sizes.tied) else []
        experts = sum(-(-part.experts // (layout.tensor * layout.expert)) for part in parts)
        whole = sum(part.held(layout.tensor, layout.expert) for part in parts)
        return whole - experts, experts
