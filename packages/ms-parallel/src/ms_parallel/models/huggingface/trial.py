"""Trial of a transformers model at a small size before the real one is built.

Our attention and stages replace internals that transformers may change in any version. A model
with the same settings but small sizes is therefore built, and its logits are compared with those
of unmodified transformers.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ms_parallel import operators
from ms_parallel.entry import one_line
from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface.config import TransformersModel, transformers
from ms_parallel.models.huggingface.plans import build_on_meta, plan_of
from ms_parallel.models.huggingface.small import small_model
from ms_parallel.models.huggingface.stage import TransformersStage
from ms_parallel.models.staged import named_weights

LENGTH, TOLERANCE = 24, 1e-3
"""Row length, and relative tolerance: far above rounding errors, far below real defects."""
DTYPES = (torch.float32, torch.float64)


@lru_cache(maxsize=64)
def check_logits(config: TransformersModel, *, staged: bool = False) -> None:
    """Check that a small model of this type computes the same logits as transformers.

    Passes without a comparison if transformers cannot run a small model with these settings.

    Args:
        config: configuration of the real model.
        staged: split the small model into the maximum number of pipeline stages.

    Raises:
        ModelError: the logits differ, or our attention cannot run the model.
    """
    if torch.get_default_dtype() not in DTYPES:
        return
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        trial = run_small_model(config)
        if trial is None:
            return
        small, model, tokens, expected = trial
        cuts = plan_of(small).cuts if staged else (0,)
        layers = [range(*ends) for ends in pairwise((*cuts, small.num_hidden_layers))]
        logits = _stage_logits(small, model, tokens, layers)
    difference = float((logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    # Also true for NaN.
    if not difference <= TOLERANCE:
        remedy = "set pipeline=1" if staged else "train this model with transformers"
        raise ModelError(
            f"logits of {config.model_type}{' in pipeline stages' if staged else ''} differ from"
            f" transformers' by {difference:.1e} in a trial at a small size; {remedy}"
        )


def check_runs(small: TransformersModel) -> None:
    """Check that transformers itself runs a small model.

    Raises:
        ModelError: it cannot, for example because the type has no default for a setting.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
            reference_model(small)(tokens, use_cache=False)
        except Exception as error:  # transformers rejects settings in many ways
            reason = one_line(str(error))[:160]
            raise ModelError(
                f"transformers cannot run a small {small.model_type} ({reason}); use a folder whose"
                " config.json has the missing settings"
            ) from error


def run_small_model(
    config: TransformersModel,
) -> tuple[TransformersModel, Any, Tensor, Tensor] | None:
    """Build a small model of this type with transformers and run it on random tokens.

    Returns:
        The small configuration, its model, tokens (1, LENGTH) and logits (1, LENGTH, V); None if
        transformers cannot run these settings.
    """
    torch.manual_seed(0)
    try:
        small = small_model(config)
        model = reference_model(small)
        tokens = torch.randint(0, small.vocab_size, (1, LENGTH))
        logits: Tensor = model(tokens, use_cache=False, return_dict=True).logits
    except Exception:  # transformers rejects settings with errors of many types
        return None
    return small, model, tokens, logits


def reference_model(small: TransformersModel) -> Any:
    """Build transformers' own model with random weights."""
    auto: Any = transformers().AutoModelForCausalLM
    settings = type(small.settings).from_dict(small.settings.to_dict())
    dtype = torch.get_default_dtype()
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = auto.from_config(settings, attn_implementation="eager", dtype=dtype, **options).eval()
    for parameter in model.parameters():
        # Larger than initial weights, and not zero, so that every part affects the logits.
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _stage_logits(
    small: TransformersModel, model: Any, tokens: Tensor, layers: Sequence[range]
) -> Tensor:
    """Compute logits (1, LENGTH, V) with our stages and the weights of transformers' model."""
    weights = model.state_dict(keep_vars=True)
    hidden = tokens
    for stage_layers in layers:
        skeleton = build_on_meta(small)
        stage = TransformersStage(skeleton, small, plan_of(small), stage_layers, operators)
        stage.to_empty(device="cpu")
        for name, value in named_weights(stage):
            # Experts: transformers has (E, 2·I, H), `PairedExperts` has (E, 2, I, H).
            value.copy_(weights[name].view(value.shape))
        try:
            # Gradients stay on: the exit of a stage checks requires_grad of its other inputs.
            with torch.enable_grad():
                hidden = stage.eval()(hidden).detach()
        except ModelError:
            raise
        except Exception as error:
            reason = one_line(str(error))[:160]
            part, remedy = "our attention", "train this model with transformers"
            if len(layers) > 1:
                part, remedy = "pipeline stages", "set pipeline=1"
            raise ModelError(
                f"{small.model_type} does not run with {part}"
                f" ({type(error).__name__}: {reason}); {remedy}"
            ) from error
    return hidden
