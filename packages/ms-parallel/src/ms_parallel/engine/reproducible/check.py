"""Layouts that cannot be bitwise reproducible, with the reasons."""

from collections.abc import Sequence

from attrs import asdict

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError, LayoutError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.plan import ModelPlan
from ms_parallel.split.own_model import OwnModelConfig
from ms_parallel.split.precision_choice import Float8

CUTS = {
    "tensor": "products of split matrices are summed in another order",
    "context": "sums over a split sequence are computed in another order",
    "expert": "an expert's product spans rows of several processes, which changes its sums",
}


def check_reproducible(
    layout: Layout, plan: ModelPlan, config: ModelConfig, float8: Float8, *, prepared: bool
) -> None:
    """Check that a layout leaves the arithmetic of each row as in a single process.

    Args:
        layout: how the processes split the work.
        plan: model plan.
        config: model configuration.
        float8: recipe of float8 products.
        prepared: whether layers are changed before they are sharded.

    Raises:
        ConfigError: float8 products are used.
        LayoutError: the layout changes the order of sums.
    """
    if float8 != "none":
        raise ConfigError(
            f"reproducible=True cannot be combined with float8={float8!r}: the scales of weight"
            " gradients depend on the rows of a microbatch; set float8 to none, or remove"
            " reproducible"
        )
    for axis, size in asdict(layout).items():
        if size > 1 and axis not in ("data", "pipeline", "replicate"):
            reason = CUTS.get(axis, "it splits single operations over processes")
            raise LayoutError(
                f"reproducible=True cannot be combined with {axis}={size}: {reason}; set {axis}=1"
                " and use data or pipeline instead, or remove reproducible"
            )
    if layout.pipeline > 1 and plan.tied and not _is_plain(config, prepared):
        raise LayoutError(
            f"reproducible=True cannot be combined with pipeline={layout.pipeline} for a model"
            " with tied weights, whose gradients are then summed in another order; set pipeline=1,"
            " or remove reproducible"
        )


def separate_tied_pair(
    plan: ModelPlan, config: ModelConfig, placement: Sequence[int], prepared: bool
) -> tuple[str, str] | None:
    """Return (owner, copy) if head and embedding share a weight on a single stage; else None."""
    if len(placement) > 1 or not plan.tied or not _is_plain(config, prepared):
        return None
    return plan.tied[0]


def _is_plain(config: ModelConfig, prepared: bool) -> bool:
    """Whether the model is an unmodified native model without MTP layers."""
    external = isinstance(config, OwnModelConfig | TransformersModel)
    return not (prepared or external or config.mtp_layers)
