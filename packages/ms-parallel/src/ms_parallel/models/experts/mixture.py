"""Mixture of experts as a block's feed-forward: router, routed experts and shared experts."""

from collections.abc import Callable

from torch import Tensor, nn

from ms_parallel.models.experts.grouped import Experts
from ms_parallel.models.experts.router import Router
from ms_parallel.models.experts.router_config import RouterConfig
from ms_parallel.models.plan import Style
from ms_parallel.models.staged import Context
from ms_parallel.models.weight_names import WeightRules, renamed, stacked
from ms_parallel.operators.protocol import Ops

STYLES: dict[str, Style] = {
    "mlp.gate": "router",
    "mlp.experts.gate_up_proj": "expert_column",
    "mlp.experts.down_proj": "expert_row",
}
"""Tensor-parallel styles by module name within a block."""


class MixtureOfExperts(nn.Module):
    """Weighted sum of each token's expert outputs, plus shared experts.

    Args:
        choice: Router settings.
        hidden: Hidden size H.
        inner: Expert width.
        ops: Operators.
        shared: Feed-forward applied to every token, called with (hidden, context=).
        gate: Gating function of the experts; SwiGLU by default.
        bias: Whether the experts' linear maps have a bias.
    """

    def __init__(
        self,
        choice: RouterConfig,
        hidden: int,
        inner: int,
        ops: Ops,
        *,
        shared: nn.Module | None = None,
        gate: Callable[[Tensor, Tensor], Tensor] | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate = Router(hidden, choice)
        self.experts = Experts(choice.num_experts, hidden, inner, ops, gate=gate, bias=bias)
        self.shared_experts = shared

    def forward(self, hidden: Tensor, *, context: Context | None = None) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        out: Tensor = self.experts(hidden, *self.gate(hidden, context=context))
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden, context=context)
        return out


def weight_rules(
    mixture: str = "mlp", matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> WeightRules:
    """Return the rules for checkpoints with one tensor per expert and matrix.

    Args:
        mixture: Checkpoint name of the `mlp` module.
        matrices: Checkpoint names of an expert's gate, up and down matrices.
    """
    on_disk = f"model.layers.{{0}}.{mixture}"
    expert = f"{on_disk}.experts.{{expert}}.{{matrix}}.weight"
    rules = {
        "model.layers.*.mlp.experts.gate_up_proj.weight": stacked(expert, *matrices[:2]),
        "model.layers.*.mlp.experts.down_proj.weight": stacked(expert, matrices[2]),
    }
    if mixture != "mlp":
        rules["model.layers.*.mlp.gate.*"] = renamed(f"{on_disk}.gate.{{1}}")
    return rules
