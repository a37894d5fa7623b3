"""Calibration: statistics of each linear layer's inputs, one decoder layer at a time.

In memory are the hidden states of the calibration tokens at one place of the model, and the
statistics of one decoder layer. A decoder layer sees what those before it make once they have been
changed, as in GPTQ (Frantar et al. 2022, arXiv:2210.17323) and Wanda. Its own linear layers are
watched in one pass before any of them is visited: inputs that they make for one another are those
of the weights as they come, which `gptq` has by then prepared, so rounded to nearest.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.errors import CalibrationError
from ms_compress.models.logits import check_tokens, evaluating
from ms_compress.models.selection import blocks_of

Statistic = Callable[[Tensor | None, Tensor], Tensor]
"""Adds inputs (T, K) float32 to what was gathered of a layer so far, None at first."""


class _Reached(Exception):  # noqa: N818 - it is no error
    """Ends a forward that has called the last decoder layer."""


_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""A decoder layer's arguments beside the hidden states: by place, and by name."""


@torch.no_grad()
def walk(
    model: nn.Module,
    batches: Sequence[Tensor],
    statistic: Statistic,
    visit: Callable[[str, nn.Linear, Tensor], None],
    wanted: set[str],
    begin: Callable[[Mapping[str, nn.Linear]], object] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Visit each wanted linear layer with the statistic of its inputs; it may change its weight.

    Args:
        model: a whole decoder of ms-parallel or transformers.
        batches: tokens, (B, S) int64 each.
        statistic: what is gathered.
        visit: gets the layer's name, the layer and its statistic.
        wanted: names of layers to visit.
        begin: gets the wanted layers of a decoder layer before any of them is visited.
        progress: called with the decoder layers that are done, from none on, and all there are.

    Raises:
        LayerError: the model is no decoder that we know.
        CalibrationError: there are no tokens, or a wanted weight or a layer's input is not finite.
        DataError: the model's vocabulary does not hold a token.
    """
    check_calibration(model, batches, wanted)
    with evaluating(model):
        hidden, calls = _arguments(model, batches)
        for number, ((prefix, block), of_block) in enumerate(
            zip(blocks_of(model), calls, strict=True)
        ):
            if progress is not None:
                progress(number, len(calls))
            layers = {
                f"{prefix}.{name}": layer
                for name, layer in block.named_modules()
                if isinstance(layer, nn.Linear) and f"{prefix}.{name}" in wanted
            }
            held = _gather(block, layers, hidden, of_block, statistic)
            if begin is not None and layers:
                begin(layers)
            for name, layer in layers.items():
                visit(name, layer, held.pop(name))
            hidden = [_run(block, x, call) for x, call in zip(hidden, of_block, strict=True)]
        if progress is not None:
            progress(len(calls), len(calls))


def check_calibration(model: nn.Module, batches: Sequence[Tensor], wanted: Container[str]) -> None:
    """Raise what `walk` would before its first visit, and change nothing."""
    blocks_of(model)
    if not batches or not all(batch.numel() for batch in batches):
        raise CalibrationError("there are no calibration tokens; give at least one batch")
    for batch in batches:
        check_tokens(model, batch, "the calibration text")
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight") if name in wanted else None
        if weight is not None and not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise CalibrationError(
                f"{name}: {bad} of its {weight.numel()} weights are NaN or infinite; look at the"
                " training, or at the folder that it was read from"
            )


def _arguments(
    model: nn.Module, batches: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[_Call]]]:
    """Catch the first decoder layer's input, and each layer's other arguments, by batch.

    Layers differ in their masks and rotary tables; what several share is held once.
    """
    blocks = [block for _, block in blocks_of(model)]
    hidden: list[Tensor] = []
    calls: dict[nn.Module, list[_Call]] = {block: [] for block in blocks}

    def catch(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        first = inputs[0] if inputs else named.pop("hidden_states")
        if block is blocks[0]:
            hidden.append(first)
        calls[block].append((tuple(inputs[1:]), named))
        if block is blocks[-1]:
            raise _Reached

    keyless = {"use_cache": False} if hasattr(model.config, "to_dict") else {}
    device = next(model.parameters()).device
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(catch, with_kwargs=True))
        for batch in batches:
            with suppress(_Reached):
                model(batch.to(device), **keyless)
    for (name, _), of_block in zip(blocks_of(model), calls.values(), strict=True):
        if len(of_block) != len(batches):
            raise CalibrationError(
                f"{name} is called {len(of_block) / len(batches):g} times a batch; only layers that"
                " a forward calls once can be calibrated"
            )
    return hidden, list(calls.values())


def _run(block: nn.Module, hidden: Tensor, call: _Call) -> Tensor:
    rest, named = call
    out = block(hidden, *rest, **named)
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _gather(
    block: nn.Module,
    layers: dict[str, nn.Linear],
    hidden: Sequence[Tensor],
    calls: Sequence[_Call],
    statistic: Statistic,
) -> dict[str, Tensor]:
    """Gather the statistic of each layer's inputs over all batches."""
    held: dict[str, Tensor] = {}
    with _watching(layers, held, statistic):
        for x, call in zip(hidden, calls, strict=True):
            _run(block, x, call)
    for name in layers:
        if name not in held:
            raise CalibrationError(f"{name} was never called with the calibration tokens")
    return held


@contextmanager
def _watching(
    layers: dict[str, nn.Linear], held: dict[str, Tensor], statistic: Statistic
) -> Iterator[None]:
    def watch(name: str) -> Callable[..., None]:
        def see(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            flat = inputs[0].detach().flatten(0, -2).float()
            if not bool(torch.isfinite(flat).all()):
                bad = int((~torch.isfinite(flat)).sum())
                raise CalibrationError(
                    f"{name}: {bad} of {flat.numel()} values of its calibration input are NaN or"
                    " infinite; look at the weights before it and at the tokens"
                )
            held[name] = statistic(held.get(name), flat)

        return see

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(watch(name)))
        yield
