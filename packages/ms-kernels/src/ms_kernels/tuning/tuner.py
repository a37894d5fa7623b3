"""Tuning table creation: the size from which a backend is faster, and the best launch parameters.

Each operator has ladders of sizes, from small to large, narrow and wide. An implementation pays off
from the smallest size at and above which it was never slower than the fallback, within `TOLERANCE`,
both for forward alone and for forward with backward. A kernel with launch parameters
(`TunedKernel`) is run with every candidate at the sizes it declares; the fastest goes into the
table.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from ms_kernels.contracts.call import describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.chips import chip_of
from ms_kernels.core.choice import Implementation, first_fit, obstacle_to
from ms_kernels.core.dispatch import describe_call
from ms_kernels.core.launches import TunedKernel, launch_of, trying
from ms_kernels.core.tables import Configuration, Table, TableEntry
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.tuning.measure import one_pass, time_interleaved

log = logging.getLogger(__name__)

TOLERANCE = 1.03
"""Ratio of two times up to which they count as equal: the noise of repeated measurements."""

STEPS = (1, 4, 16, 64, 256, 1024, 4096)
"""Multiples of a ladder's growing dims to measure."""

LIMIT_FLOPS = 1e9
"""Maximum FLOPs of a measured size on the CPU; times 1,000 on an accelerator."""

LIMIT_BYTES = 1e8
"""Maximum memory traffic of a measured size on the CPU; times 100 on an accelerator."""


def tune(
    device: torch.device,
    *,
    operators: Iterable[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    spend_s: float = 0.1,
    on_progress: Callable[[str], object] = lambda line: None,
) -> Table:
    """Measure every implementation that runs on `device` and return its tuning table.

    Args:
        device: device to measure on.
        operators: names of operators; all if None.
        dtypes: dtypes of the first argument to measure.
        spend_s: seconds per implementation and size.
        on_progress: called with one line per finished implementation and dtype.
    """
    measure = _Measure(device=device, spend_s=spend_s)
    entries = []
    for implementation in IMPLEMENTATIONS:
        if operators is not None and implementation.operator not in operators:
            continue
        # Without a threshold or launch parameters there is nothing to tune.
        for dtype in dtypes if implementation.pays_from or implementation.tuned else ():
            entry = measure.entry(implementation, dtype)
            if entry is None:
                continue
            entries.append(entry)
            configurations = (
                f", {len(entry.configurations)} configurations" if implementation.tuned else ""
            )
            threshold = "no size" if entry.pays_from is None else f"{entry.pays_from} elements"
            on_progress(
                f"{implementation.operator} {implementation.backend} {entry.dtype}: "
                f"pays from {threshold}{configurations}"
            )
    version = torch.__version__.partition("+")[0]
    return Table(chip=chip_of(device), torch=version, entries=tuple(entries))


@frozen(kw_only=True)
class _Measure:
    """Measurement of implementations on one device."""

    device: torch.device
    spend_s: float
    """Seconds per implementation and size."""

    def entry(self, candidate: Implementation, dtype: torch.dtype) -> TableEntry | None:
        """Measure one implementation in one dtype; None if it does not support these calls."""
        contract = CONTRACTS[candidate.operator]
        configurations = tuple(self._configurations(candidate, dtype))
        sizes = _sizes(contract, self.device) if candidate.pays_from else ()
        measured = (self._compare(candidate, dims, dtype) for dims in sizes)
        ratios = [ratio for ratio in measured if ratio is not None]
        if not ratios and not configurations:
            return None
        return TableEntry(
            operator=candidate.operator,
            backend=candidate.backend,
            version=candidate.version,
            dtype=describe(dtype),
            pays_from=_pays_from(ratios) if candidate.pays_from else 0,
            configurations=configurations,
        )

    def _compare(
        self, candidate: Implementation, dims: Mapping[str, int], dtype: torch.dtype
    ) -> tuple[int, float] | None:
        """Return a call's number of elements, and its time relative to the fallback's.

        The ratio is the larger of forward alone and forward with backward.
        """
        contract, inputs = CONTRACTS[candidate.operator], self._inputs(candidate, dims, dtype)
        call = describe_call(contract, inputs, contract.defaults)
        lower_ranked = IMPLEMENTATIONS[IMPLEMENTATIONS.index(candidate) + 1 :]
        fallback = first_fit(call, lower_ranked)
        if fallback is None or obstacle_to(candidate, call) is not None:
            return None
        worst = 0.0
        differentiable = any(argument.differentiable for argument in contract.arguments)
        for backward in (False, True) if differentiable else (False,):
            functions = {
                name: one_pass(contract, choice.run, inputs, contract.defaults, backward=backward)
                for name, choice in (("own", candidate), ("other", fallback))
            }
            seconds = time_interleaved(functions, self.device, spend_s=self.spend_s)
            worst = max(worst, seconds["own"] / seconds["other"])
        return call.elements, worst

    def _inputs(
        self, candidate: Implementation, dims: Mapping[str, int], dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, ...]:
        contract = CONTRACTS[candidate.operator]
        tensors = contract.draw(dims, dtype=dtype, device=self.device)
        return tuple(
            None if argument.optional else tensors[argument.name] for argument in contract.arguments
        )

    def _configurations(
        self, candidate: Implementation, dtype: torch.dtype
    ) -> Iterator[Configuration]:
        """Yield the fastest parameters of each kernel, merging sizes with equal parameters.

        Kernels are tuned one at a time; the others use the parameters from the tables.
        """
        contract = CONTRACTS[candidate.operator]
        optional = [argument.name for argument in contract.arguments if argument.optional]
        for kernel in candidate.tuned:
            configurations: list[Configuration] = []
            for sizes in kernel.tried_at:
                dims = {**contract.example, **sizes}
                # Check before allocating inputs: these sizes are meant for an accelerator.
                call = contract.call(dims, dtype=dtype, device=self.device, without=optional)
                if obstacle_to(candidate, call) is not None:
                    continue
                inputs = self._inputs(candidate, dims, dtype)
                at_most = {name: dims[name] for name in kernel.sizes}
                values = self._fastest(candidate, kernel, inputs, tuple(at_most.values()))
                if configurations and configurations[-1].values == values:
                    configurations.pop()
                configuration = Configuration(
                    kernel=kernel.name, at_most=at_most, values=dict(values)
                )
                configurations.append(configuration)
            yield from configurations

    def _fastest(
        self,
        candidate: Implementation,
        kernel: TunedKernel,
        inputs: tuple[Any, ...],
        sizes: tuple[int, ...],
    ) -> Mapping[str, int]:
        """Return the parameters with the fastest forward and backward; skip those that fail."""
        contract = CONTRACTS[candidate.operator]
        call = describe_call(contract, inputs, contract.defaults)
        current = launch_of(kernel, call.chip, describe(call.dtype), sizes).values
        run_once = one_pass(contract, candidate.run, inputs, contract.defaults, backward=True)

        def with_values(values: Mapping[str, int]) -> Callable[[], object]:
            def step() -> object:
                with trying(kernel, values):
                    return run_once()

            return step

        tried = [current, *(values for values in kernel.candidates if values != current)]
        functions = {str(index): with_values(values) for index, values in enumerate(tried)}
        # The first run also compiles, and shows which parameters the chip does not support.
        for name, function in list(functions.items())[1:]:
            try:
                function()
            except Exception as error:  # too many resources; Triton has no common error class
                log.info("%s with %s: %s", kernel.name, tried[int(name)], error)
                del functions[name]
        seconds = time_interleaved(functions, self.device, spend_s=self.spend_s, rounds=3)
        return tried[int(min(seconds, key=lambda name: seconds[name]))]


def _sizes(contract: Contract, device: torch.device) -> Iterator[dict[str, int]]:
    """Yield the sizes to measure, in order of increasing work."""
    scale = 1 if device.type == "cpu" else 100  # 100**1.5 = 1,000, the factor of LIMIT_FLOPS
    candidates = []
    for ladder in contract.ladders:
        for step in STEPS:
            grown = {name: step * ladder.sizes.get(name, 1) for name in ladder.grows}
            dims = {**contract.example, **ladder.sizes, **grown}
            work = contract.forward(dims, 4)  # 4 bytes per element
            if work.flops <= LIMIT_FLOPS * scale**1.5 and work.size_bytes <= LIMIT_BYTES * scale:
                candidates.append((work.flops, dims))
    for _, dims in sorted(candidates, key=lambda pair: pair[0]):
        yield dims


def largest(contract: Contract, device: torch.device) -> dict[str, int]:
    """Return the largest measured sizes."""
    *_, dims = _sizes(contract, device)
    return dims


def _pays_from(ratios: Sequence[tuple[int, float]]) -> int | None:
    """Return the smallest number of elements from which no ratio exceeds `TOLERANCE`, or None."""
    threshold = None
    # From the largest size down to the first at which it is slower.
    for elements, ratio in sorted(ratios, reverse=True):
        if ratio > TOLERANCE:
            break
        threshold = elements
    # If it pays off at the smallest measured size, assume that it does at all smaller sizes.
    return 0 if threshold is not None and threshold == min(ratios)[0] else threshold
