"""Layers and weights of each pipeline rank."""

from attrs import define, field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.layouts.candidate import Candidate
from ms_parallel.planner.layouts.pipeline import stage_ranks
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.split.stages import cut_layers

Stage = tuple[int, range]
"""(stage, layers)."""


@frozen(kw_only=True)
class RankWeights:
    """Number of parameters on a rank."""

    unsharded: int
    """Before sharding."""
    sharded: int
    """After sharding."""


@define
class Stages:
    """Stages of a model under all schedules, cached.

    Args:
        sizes: sizes of the model.
    """

    sizes: ModelSizes
    by_schedule: dict[tuple[str, int], list[list[Stage]]] = field(factory=dict)
    weight_counts: dict[tuple[str, int, int, int], list[tuple[int, int]]] = field(factory=dict)

    def of(self, schedule: str, ranks: int) -> list[list[Stage]]:
        """Stages of each pipeline rank.

        Raises:
            LayoutError: there are more stages than cut points.
        """
        if (schedule, ranks) not in self.by_schedule:
            ranks_by_stage = stage_ranks(schedule, ranks)
            layers = cut_layers(len(self.sizes.layers), len(ranks_by_stage), self.sizes.cuts)
            stages_by_rank: list[list[Stage]] = [[] for _ in range(ranks)]
            for stage, rank in enumerate(ranks_by_stage):
                stages_by_rank[rank].append((stage, layers[stage]))
            self.by_schedule[schedule, ranks] = stages_by_rank
        return self.by_schedule[schedule, ranks]

    def weights(self, candidate: Candidate) -> list[RankWeights]:
        """Number of parameters of each pipeline rank."""
        layout = candidate.layout
        # Experts are already divided over expert ranks, so fewer ranks shard them.
        shards = 1 if candidate.sharding == "replicate" else layout.shards
        return [
            RankWeights(
                unsharded=dense + experts,
                sharded=-(-dense // shards) + -(-experts // max(1, shards // layout.expert)),
            )
            for dense, experts in self._weight_counts(candidate.schedule, layout)
        ]

    def _weight_counts(self, schedule: str, layout: Layout) -> list[tuple[int, int]]:
        """Number of parameters of each rank: without experts, and in experts."""
        key = (schedule, layout.pipeline, layout.tensor, layout.expert)
        if key not in self.weight_counts:
            self.weight_counts[key] = [
                self._count(stages, layout) for stages in self.of(schedule, layout.pipeline)
            ]
        return self.weight_counts[key]

    def _count(self, stages: list[Stage], layout: Layout) -> tuple[int, int]:
        sizes = self.sizes
        parts = [sizes.layers[n] for _, layers in stages for n in layers]
        has_first = any(layers.start == 0 for _, layers in stages)
        has_last = any(layers.stop == len(sizes.layers) for _, layers in stages)
        parts += [sizes.first] if has_first else []
        # A tied head on the rank of the embedding has no weight of its own.
        parts += [sizes.last] if has_last and not (has_first and sizes.tied) else []
        experts = sum(-(-part.experts // (layout.tensor * layout.expert)) for part in parts)
        total = sum(part.rank_parameters(layout.tensor, layout.expert) for part in parts)
        return total - experts, experts
