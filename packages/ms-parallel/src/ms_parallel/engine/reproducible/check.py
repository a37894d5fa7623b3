"""What cannot be the same to the bit under other layouts, with the reason."""

from collections.abc import Sequence

from attrs import asdict

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.foreign.config import TransformersModel
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.own_model import OwnModelConfig

CUTS = {
    "tensor": "it cuts matrices, and a product of parts is added up in another order",
    "context": "it cuts rows of tokens, and sums over a row are added up in another order",
    "expert": "it puts rows of several processes into one product, whose sums then differ",
}


def check_reproducible(
    layout: Layout, plan: ModelPlan, config: ModelConfig, *, prepared: bool
) -> None:
    """Check that a layout leaves each row's arithmetic as it is in one process.

    Args:
        layout: how the processes split the work.
        plan: of the model.
        config: of the model.
        prepared: whether layers are changed before they are sharded.

    Raises:
        LayoutError: it does not.
    """
    for axis, size in asdict(layout).items():
        if size > 1 and axis not in ("data", "pipeline", "replicate"):
            why = CUTS.get(axis, "it divides what one process computes at once")
            raise LayoutError(
                f"reproducible=True cannot hold with {axis}={size}: {why}; set {axis}=1 and give"
                " its processes to data or pipeline, or leave reproducible out"
            )
    if layout.pipeline > 1 and plan.tied and not _is_plain(config, prepared):
        raise LayoutError(
            f"reproducible=True cannot hold with pipeline={layout.pipeline} and the weights that"
            " this model ties: one stage adds up their gradients in another order than several;"
            " set pipeline=1, or leave reproducible out"
        )


def kept_apart(
    plan: ModelPlan, config: ModelConfig, placement: Sequence[int], prepared: bool
) -> tuple[str, str] | None:
    """Return (owner, copy) of the head where it uses the embedding's weight, on one stage."""
    if len(placement) > 1 or not plan.tied or not _is_plain(config, prepared):
        return None
    return plan.tied[0]


def _is_plain(config: ModelConfig, prepared: bool) -> bool:
    """Return whether the model is one of our families as it comes, with only the head tied."""
    foreign = isinstance(config, OwnModelConfig | TransformersModel)
    return not (prepared or foreign or config.mtp_layers)
