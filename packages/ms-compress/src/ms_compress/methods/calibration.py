"""Calibration: statistics of the inputs of each linear layer, one decoder layer at a time.

Memory holds the hidden states of the calibration tokens at one depth of the model, and the
statistics of one decoder layer. A decoder layer sees the outputs of the layers before it after they
were changed, as in GPTQ (Frantar et al. 2022, arXiv:2210.17323) and Wanda. All its linear layers
are observed in one pass before any is changed, so their inputs from one another come from unchanged
weights; `gptq` has prepared these, so they are rounded to nearest.

A checkpoint stores each finished decoder layer. A restarted walk loads these and runs them once, so
that the next layer gets the same inputs, bit for bit.
"""

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any, Generic, Protocol, TypeVar

import torch
from attrs import frozen
from torch import Tensor, nn

from ms_compress.arguments import check_callable, check_items, check_type, shown
from ms_compress.errors import CalibrationError, LayerError
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks, check_ranks
from ms_compress.models.experts import separated
from ms_compress.models.logits import check_tokens, evaluating, next_token_logits
from ms_compress.models.selection import blocks_of
from ms_compress.quantization.layers import Prepared, prepared_layers

logger = logging.getLogger(__name__)

S = TypeVar("S")
Statistic = Callable[[S | None, Tensor], S]
"""Accumulate inputs (T, K) float32 into a layer's statistic (None for the first batch)."""


@frozen(kw_only=True, eq=False)
class CalibratedBlock(Generic[S]):
    """A decoder layer with statistics of the inputs of its linear layers."""

    name: str
    module: nn.Module
    layers: Mapping[str, nn.Linear]
    """Target layers by their name in the model."""
    statistics: dict[str, S]
    """Statistic of each target layer; remove an entry to free its memory."""
    run: Callable[[int], Tensor]
    """Return the decoder layer's output (B, S, D) for a batch, with its current weights."""
    float_outputs: Sequence[Tensor] = ()
    """Output (B, S, D) for each batch in the float model, if the walk computes it."""


class BlockCheckpoint(Protocol):
    """Storage of finished decoder layers."""

    def load(self, name: str, block: nn.Module) -> bool:
        """Restore a decoder layer; return False if it is not stored."""
        ...

    def save(self, name: str, block: nn.Module) -> None:
        """Store a finished decoder layer."""
        ...


class _ReachedLastLayer(Exception):  # noqa: N818 - not an error
    """Stops a forward at the last decoder layer."""


_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a decoder layer other than the hidden states: positional and keyword."""


@torch.no_grad()
def walk(
    model: nn.Module,
    batches: Sequence[Tensor],
    statistic: Statistic[S] | None,
    visit: Callable[[CalibratedBlock[S]], None],
    targets: set[str],
    *,
    in_float: bool = False,
    float_outputs: bool = False,
    checkpoint: BlockCheckpoint | None = None,
    progress: Callable[[int, int], object] | None = None,
    ranks: DataRanks = ONE_PROCESS,
    combine: Callable[[DataRanks, S], S] | None = None,
) -> None:
    """Visit decoder layers in order, with statistics of their linear layers' inputs.

    A visit may change weights; later layers then see the inputs of the changed model.

    Args:
        model: a complete decoder from ms-parallel or transformers.
        batches: tokens, (B, S) int64 each.
        statistic: accumulates a layer's inputs. None: nothing is observed.
        visit: called with each decoder layer that has targets.
        targets: names of the linear layers to observe.
        in_float: switch off a decoder layer's quantization while observing and visiting it.
        float_outputs: also compute the float model's output of each decoder layer; memory then
            holds the hidden states of both models.
        checkpoint: storage of finished decoder layers, which are loaded instead of visited.
        progress: called with the number of finished decoder layers, from 0, and their total.
        ranks: processes that calibrate on the other batches.
        combine: combines the statistics of all processes; needed for more than one.

    Raises:
        LayerError: the model's architecture is not supported.
        CalibrationError: no tokens are given, or a target weight or a layer's input is not finite.
        DataError: a token is outside the model's vocabulary.
    """
    check_calibration(model, batches, targets)
    check_callable("progress", progress, error=CalibrationError, optional=True)
    if checkpoint is not None and not hasattr(checkpoint, "load"):
        raise CalibrationError(f"checkpoint must be a BlockCheckpoint, got {shown(checkpoint)}")
    with evaluating(model):
        hidden, calls = _arguments(model, batches)  # hidden: one (B, S, D) per batch
        float_hidden = list(hidden) if float_outputs else []
        for number, ((prefix, block), layer_calls) in enumerate(
            zip(blocks_of(model), calls, strict=True)
        ):
            if progress is not None:
                progress(number, len(calls))
            layers = {
                f"{prefix}.{name}": layer
                for name, layer in block.named_modules()
                if isinstance(layer, nn.Linear) and f"{prefix}.{name}" in targets
            }
            # Before the layer is changed, or replaced by a stored one.
            with float_layers(block):
                for index, x in enumerate(float_hidden):
                    float_hidden[index] = _run(block, x, layer_calls[index])
            stored = ranks.is_first and checkpoint is not None and checkpoint.load(prefix, block)
            if layers and not ranks.any(stored):
                with float_layers(block) if in_float else ExitStack():
                    # First pass, before any change: all layers see their unchanged siblings.
                    statistics: dict[str, S] = {}
                    if statistic is not None:
                        statistics = _gather(
                            block, layers, hidden, layer_calls, statistic, ranks, combine
                        )
                    visit(
                        CalibratedBlock(
                            name=prefix,
                            module=block,
                            layers=layers,
                            statistics=statistics,
                            run=lambda index, block=block, calls=layer_calls: (  # type: ignore[misc]
                                _run(block, hidden[index], calls[index])
                            ),
                            float_outputs=float_hidden,
                        )
                    )
                if checkpoint is not None and ranks.is_first:
                    checkpoint.save(prefix, block)
            # The same on all processes, unless their processors round differently.
            ranks.copy_from_first(block)
            # Second pass with the changed weights: the next layer sees the compressed inputs.
            # Layers loaded from the checkpoint only take this pass.
            for index, call in enumerate(layer_calls):
                hidden[index] = _run(block, hidden[index], call)
            layer_calls.clear()
        if progress is not None:
            progress(len(calls), len(calls))


@contextmanager
def float_layers(block: nn.Module) -> Iterator[None]:
    """Switch off the quantization of a module's prepared layers in a `with` block."""
    # Saved, as a layer may already be switched off by the caller.
    layers = [layer for layer in block.modules() if isinstance(layer, Prepared)]
    modes = [layer.quantizing for layer in layers]
    for layer in layers:
        layer.quantizing = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.quantizing = mode


@torch.no_grad()
def calibrate_inputs(
    model: nn.Module, batches: Sequence[Tensor], *, ranks: DataRanks = ONE_PROCESS
) -> None:
    """Set the input scales of prepared layers from their largest inputs in the float model.

    Only schemes with static inputs, such as `ct.fp8` and `ct.nvfp4`, have such scales; for others
    nothing is computed. Larger inputs saturate. Training raises the scales to its largest inputs
    too.

    Args:
        model: a complete prepared decoder from ms-parallel or transformers.
        batches: tokens, (B, S) int64 each.
        ranks: processes that calibrate on the other batches.

    Raises:
        CalibrationError: no tokens are given, or an input is NaN or infinite.
        DataError: a token is outside the model's vocabulary.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    check_ranks(ranks)
    layers = {name: layer for name, layer in prepared_layers(model) if layer.input_peak is not None}
    if not layers:
        return
    check_calibration(model, batches, set(layers))
    device = next(model.parameters()).device
    for layer in layers.values():
        layer.quantizing, layer.calibrating = False, True
    try:
        with evaluating(model):
            for batch in batches:
                next_token_logits(model, batch.to(device))
    finally:
        for layer in layers.values():
            layer.quantizing, layer.calibrating = True, False
    for name, layer in layers.items():
        peak = layer.input_peak
        if peak is not None:
            peak.copy_(ranks.max(peak))
        if peak is not None and not bool(torch.isfinite(peak)):
            peak.zero_()
            raise CalibrationError(
                f"{name}: its calibration input has NaN or infinite values; check the weights"
                " before it, and the tokens"
            )


def check_calibration(model: nn.Module, batches: Sequence[Tensor], targets: Container[str]) -> None:
    """Raise the errors that `walk` would raise before its first visit; changes nothing."""
    check_items("batches", batches, Tensor, "tensors of tokens", error=CalibrationError)
    blocks_of(model)
    if len(batches) == 0 or not all(batch.numel() for batch in batches):
        raise CalibrationError("calibration needs tokens; pass at least one batch")
    for batch in batches:
        check_tokens(model, batch, "the calibration text")
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight") if name in targets else None
        if weight is not None and not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise CalibrationError(
                f"{name}: {bad} of its {weight.numel()} weights are NaN or infinite; check the"
                " training, or the folder that it was loaded from"
            )


def _arguments(
    model: nn.Module, batches: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[_Call]]]:
    """Record the first decoder layer's input, and every layer's other arguments, by batch.

    The other arguments are masks and rotary tables. Tensors that several layers share, or that are
    equal in successive batches, are stored once.
    """
    blocks = [block for _, block in blocks_of(model)]
    hidden: list[Tensor] = []
    calls: dict[nn.Module, list[_Call]] = {block: [] for block in blocks}

    def record(block: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        first = inputs[0] if inputs else kwargs.pop("hidden_states")
        if block is blocks[0]:
            hidden.append(first)
        previous = calls[block][-1] if calls[block] else None
        calls[block].append(_with_shared_tensors((tuple(inputs[1:]), kwargs), previous))
        # The last layer's arguments are recorded, so its output and the head are not needed.
        if block is blocks[-1]:
            raise _ReachedLastLayer

    # transformers would otherwise return a KV cache.
    no_cache = {"use_cache": False} if hasattr(model.config, "to_dict") else {}
    device = next(model.parameters()).device
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(record, with_kwargs=True))
        for batch in batches:
            with suppress(_ReachedLastLayer):
                model(batch.to(device), **no_cache)
    for (name, _), layer_calls in zip(blocks_of(model), calls.values(), strict=True):
        if len(layer_calls) != len(batches):
            raise CalibrationError(
                f"{name} is called {len(layer_calls) / len(batches):g} times per batch; only layers"
                " that are called once per forward can be calibrated"
            )
    return hidden, list(calls.values())


def _with_shared_tensors(call: _Call, previous: _Call | None) -> _Call:
    """Replace tensors by equal tensors of the previous batch, to store masks and tables once."""
    if previous is None or len(call[0]) != len(previous[0]):
        return call
    args = tuple(_shared(new, old) for new, old in zip(call[0], previous[0], strict=True))
    return args, {name: _shared(new, previous[1].get(name)) for name, new in call[1].items()}


def _shared(new: Any, old: Any) -> Any:
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        return old if new.shape == old.shape and torch.equal(new, old) else new
    if isinstance(new, tuple) and isinstance(old, tuple) and type(new) is tuple:
        return tuple(map(_shared, new, old)) if len(new) == len(old) else new
    return new


def _run(block: nn.Module, hidden: Tensor, call: _Call) -> Tensor:
    args, kwargs = call
    out = block(hidden, *args, **kwargs)
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _gather(
    block: nn.Module,
    layers: dict[str, nn.Linear],
    hidden: Sequence[Tensor],
    calls: Sequence[_Call],
    statistic: Statistic[S],
    ranks: DataRanks,
    combine: Callable[[DataRanks, S], S] | None,
) -> dict[str, S]:
    """Return the statistic of each layer's inputs over all batches of all processes."""
    statistics: dict[str, S] = {}
    with _observing(layers, statistics, statistic):
        for x, call in zip(hidden, calls, strict=True):
            _run(block, x, call)
    if ranks.count > 1:
        assert combine is not None
        # An expert may get tokens on only some processes; on the others its statistic is empty.
        seen = ranks.max(torch.tensor([name in statistics for name in layers], dtype=torch.int32))
        for (name, layer), is_seen in zip(layers.items(), seen.tolist(), strict=True):
            if is_seen:
                empty = hidden[0].new_zeros((0, layer.in_features), dtype=torch.float32)
                local = statistics[name] if name in statistics else statistic(None, empty)
                statistics[name] = combine(ranks, local)
    _share_statistics(block, layers, statistics)
    for name in layers:
        if name not in statistics:
            raise CalibrationError(f"{name} was never called with the calibration tokens")
    return statistics


def _share_statistics(
    block: nn.Module, layers: dict[str, nn.Linear], statistics: dict[str, S]
) -> None:
    """Give experts that saw no token the statistics of another expert of their layer.

    All experts of a layer read the same features, so these statistics are the closest available.
    """
    # Only target layers have statistics; names within the block differ from names in the model.
    names = {id(layer): name for name, layer in layers.items()}
    for prefix, experts in separated(block):
        groups: dict[str, list[str]] = {}  # names of all experts' layers by matrix
        for path, layer in experts.named_modules():
            if id(layer) in names:
                groups.setdefault(path.partition(".")[2], []).append(names[id(layer)])
        unseen = 0
        for group in groups.values():
            seen = [name for name in group if name in statistics]
            if not seen:
                continue
            unseen = len(group) - len(seen)
            for name in group:
                # A copy, as statistics are changed in place when scales are folded.
                if name not in statistics:
                    statistics[name] = deepcopy(statistics[seen[0]])
        if unseen:
            logger.warning(
                "%s.%s: %d of %d experts saw no calibration token and use the statistics of another"
                " expert; use more rows",
                next(iter(layers)).split(".mlp.")[0],
                prefix,
                unseen,
                experts.count,
            )


@contextmanager
def _observing(
    layers: dict[str, nn.Linear], statistics: dict[str, S], statistic: Statistic[S]
) -> Iterator[None]:
    def observe(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            inputs_TK = inputs[0].detach().flatten(0, -2).float()
            if not bool(torch.isfinite(inputs_TK).all()):
                bad = int((~torch.isfinite(inputs_TK)).sum())
                raise CalibrationError(
                    f"{name}: {bad} of {inputs_TK.numel()} values of its calibration input are NaN"
                    " or infinite; check the weights before it, and the tokens"
                )
            statistics[name] = statistic(statistics.get(name), inputs_TK)

        return hook

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(observe(name)))
        yield
