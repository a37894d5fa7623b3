"""The loss of a causal language model of transformers without its logits."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, get_args, get_type_hints

import torch.nn.functional as F
from torch import Tensor, nn

from ms_kernels.operators.linear_cross_entropy.operator import linear_cross_entropy

IGNORED = -100
"""Label of positions that are excluded from the loss, as in transformers."""

_LOSS_OPTIONS = {"labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep"}
"""Arguments that the decoder below the output matrix does not accept."""


def has_plain_logits(model: nn.Module) -> bool:
    """Check that a model is a causal language model whose logits are hidden states times a matrix.

    The source of `forward` decides: models that scale or cap their logits assign them more than
    once, or by a larger expression. A trial run would miss a cap, which hardly changes the small
    logits of an untrained model.
    """
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    if getattr(head, "bias", None) is not None or causal_output_class(model) is None:
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, SyntaxError):
        return False
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        and "logits" in {ast.unparse(target) for target in _targets(node)}
    ]
    if len(values) != 1:
        return False
    return isinstance(values[0], ast.Call) and ast.unparse(values[0].func) == "self.lm_head"


@cache
def forward_without_logits(model_class: Any, output_class: type) -> Callable[..., Any]:
    """Return a forward that, in training with labels, does not materialize the logits."""

    @wraps(model_class.forward)  # the Trainer reads the names of its parameters
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with_router_logits = kwargs.get("output_router_logits")
        if with_router_logits is None:
            with_router_logits = getattr(self.config, "output_router_logits", False)
        is_training = self.training and kwargs.get("labels") is not None
        if not is_training or with_router_logits or kwargs.get("return_dict") is False:
            return model_class.forward(self, *args, **kwargs)
        hidden_states, attentions, loss = loss_without_logits(self, *args, **kwargs)
        return output_class(loss=loss, hidden_states=hidden_states, attentions=attentions)

    return forward


def loss_without_logits(model: Any, *args: Any, labels: Tensor, **kwargs: Any) -> tuple[Any, ...]:
    """Return the loss and the requested hidden states and attention weights.

    Args:
        model: a model with plain logits.
        args: arguments of the model's forward before `labels`.
        labels: (B, S) tokens, shifted here; -100 is excluded.
        kwargs: further arguments of the model's forward. `num_items_in_batch` divides the summed
            loss in place of the number of labels, as the Trainer requires for gradient
            accumulation.
    """
    decoder = getattr(model, model.base_model_prefix)
    outputs = decoder(*args, **{k: v for k, v in kwargs.items() if k not in _LOSS_OPTIONS})
    hidden = outputs.last_hidden_state  # (B, S, H)
    targets = kwargs.get("shift_labels")
    if targets is None:
        targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    count = kwargs.get("num_items_in_batch")
    loss = linear_cross_entropy(
        hidden,
        model.lm_head.weight.to(hidden.dtype),
        targets.to(hidden.device),
        ignore_index=kwargs.get("ignore_index", IGNORED),
        reduction="mean" if count is None else "sum",
    )
    if count is not None:
        loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
    return outputs.get("hidden_states"), outputs.get("attentions"), loss


def causal_output_class(model: nn.Module) -> type | None:
    """Return the class of a causal language model's output; None for another kind of model."""
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    try:
        returned = get_type_hints(inspect.unwrap(type(model).forward)).get("return")
    except NameError:  # a type imported only for type checkers
        return None
    classes = (CausalLMOutputWithPast, MoeCausalLMOutputWithPast)
    return next((each for each in classes if each in (returned, *get_args(returned))), None)


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
