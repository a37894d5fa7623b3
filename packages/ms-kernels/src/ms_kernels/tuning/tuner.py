"""Makes a tuning table: measures from which size a backend pays, and how its kernels run best.

For each operator there is a ladder of sizes, small to large, narrow and wide. An implementation
pays from the smallest size at and above which it was never slower, within `EVEN`, than what would
be taken in its place, neither forward alone nor forward and backward. A kernel with parameters
(`TunedKernel`) runs with each candidate at sizes of its own; the fastest goes to the table.
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
from ms_kernels.tuning.measure import in_turn, one_pass

log = logging.getLogger(__name__)

EVEN = 1.03
"""Ratio of two times that counts as a tie: what repeated measurements differ by."""

STEPS = (1, 4, 16, 64, 256, 1024, 4096)
"""How many units of what grows are tried."""

LIMIT_FLOPS = 1e9
"""Work of the largest size on the CPU; an accelerator is given a thousand times as much."""

LIMIT_BYTES = 1e8
"""Memory of the largest size on the CPU; an accelerator is given a hundred times as much."""


def tune(
    device: torch.device,
    *,
    operators: Iterable[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    spend_s: float = 0.1,
    on_progress: Callable[[str], object] = lambda line: None,
) -> Table:
    """Measure every implementation that runs on `device` and return its table.

    Args:
        device: where to measure.
        operators: names; all if None.
        dtypes: of the first argument.
        spend_s: seconds for one way at one size.
        on_progress: takes a line for each implementation as it is done.
    """
    measure = _Measure(device=device, spend_s=spend_s)
    entries = []
    for each in IMPLEMENTATIONS:
        if operators is not None and each.operator not in operators:
            continue
        for dtype in dtypes if each.pays_from or each.tuned else ():  # else nothing is to be found
            entry = measure.entry(each, dtype)
            if entry is None:
                continue
            entries.append(entry)
            chosen = f", {len(entry.configurations)} configurations" if each.tuned else ""
            from_ = "no size" if entry.pays_from is None else f"{entry.pays_from} elements"
            on_progress(f"{each.operator} {each.backend} {entry.dtype}: pays from {from_}{chosen}")
    version = torch.__version__.partition("+")[0]
    return Table(chip=chip_of(device), torch=version, entries=tuple(entries))


@frozen(kw_only=True)
class _Measure:
    """Measures implementations on one device."""

    device: torch.device
    spend_s: float
    """Seconds for one way at one size."""

    def entry(self, candidate: Implementation, dtype: torch.dtype) -> TableEntry | None:
        """Measure one implementation in one dtype, or return None where it takes no such call."""
        contract = CONTRACTS[candidate.operator]
        configurations = tuple(self._configurations(candidate, dtype))
        sizes = _sizes(contract, self.device) if candidate.pays_from else ()
        found = (self._compare(candidate, dims, dtype) for dims in sizes)
        ratios = [each for each in found if each is not None]
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
        """Return a call's elements, and the time beside what would be taken instead.

        The ratio is the worse one of forward alone and forward with backward.
        """
        contract, inputs = CONTRACTS[candidate.operator], self._inputs(candidate, dims, dtype)
        call = describe_call(contract, inputs, contract.defaults)
        after = IMPLEMENTATIONS[IMPLEMENTATIONS.index(candidate) + 1 :]
        instead = first_fit(call, after)
        if instead is None or obstacle_to(candidate, call) is not None:
            return None
        worst = 0.0
        differentiable = any(argument.differentiable for argument in contract.arguments)
        for backward in (False, True) if differentiable else (False,):
            ways = {
                name: one_pass(contract, each.run, inputs, contract.defaults, backward=backward)
                for name, each in (("own", candidate), ("other", instead))
            }
            took = in_turn(ways, self.device, spend_s=self.spend_s)
            worst = max(worst, took["own"] / took["other"])
        return call.elements, worst

    def _inputs(
        self, candidate: Implementation, dims: Mapping[str, int], dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, ...]:
        contract = CONTRACTS[candidate.operator]
        drawn = contract.draw(dims, dtype=dtype, device=self.device)
        return tuple(None if each.optional else drawn[each.name] for each in contract.arguments)

    def _configurations(
        self, candidate: Implementation, dtype: torch.dtype
    ) -> Iterator[Configuration]:
        """Yield each kernel's fastest parameters, without sizes that have those of the next one.

        Kernels are tuned one after the other, while the others run as the tables say.
        """
        contract = CONTRACTS[candidate.operator]
        spare = [argument.name for argument in contract.arguments if argument.optional]
        for kernel in candidate.tuned:
            found: list[Configuration] = []
            for sizes in kernel.tried_at:
                dims = {**contract.example, **sizes}
                # Asked before anything is drawn: these sizes are an accelerator's.
                call = contract.call(dims, dtype=dtype, device=self.device, without=spare)
                if obstacle_to(candidate, call) is not None:
                    continue
                inputs = self._inputs(candidate, dims, dtype)
                at_most = {name: dims[name] for name in kernel.sizes}
                values = self._fastest(candidate, kernel, inputs, tuple(at_most.values()))
                if found and found[-1].values == values:
                    found.pop()
                each = Configuration(kernel=kernel.name, at_most=at_most, values=dict(values))
                found.append(each)
            yield from found

    def _fastest(
        self,
        candidate: Implementation,
        kernel: TunedKernel,
        inputs: tuple[Any, ...],
        sizes: tuple[int, ...],
    ) -> Mapping[str, int]:
        """Return the parameters that are fastest, forward and backward, of those that run."""
        contract = CONTRACTS[candidate.operator]
        call = describe_call(contract, inputs, contract.defaults)
        standing = launch_of(kernel, call.chip, describe(call.dtype), sizes).values
        plain = one_pass(contract, candidate.run, inputs, contract.defaults, backward=True)

        def under(values: Mapping[str, int]) -> Callable[[], object]:
            def step() -> object:
                with trying(kernel, values):
                    return plain()

            return step

        tried = [standing, *(each for each in kernel.candidates if each != standing)]
        ways = {str(place): under(each) for place, each in enumerate(tried)}
        for name, way in list(ways.items())[1:]:
            try:
                way()
            except Exception as error:  # Triton has no base class of its errors: it does not fit
                log.info("%s with %s: %s", kernel.name, tried[int(name)], error)
                del ways[name]
        took = in_turn(ways, self.device, spend_s=self.spend_s, rounds=3)
        return tried[int(min(took, key=lambda name: took[name]))]


def _sizes(contract: Contract, device: torch.device) -> Iterator[dict[str, int]]:
    """Yield the sizes to try, least work first."""
    more = 1 if device.type == "cpu" else 100
    found = []
    for ladder in contract.ladders:
        for step in STEPS:
            grown = {name: step * ladder.sizes.get(name, 1) for name in ladder.grows}
            dims = {**contract.example, **ladder.sizes, **grown}
            work = contract.forward(dims, 4)
            if work.flops <= LIMIT_FLOPS * more**1.5 and work.size_bytes <= LIMIT_BYTES * more:
                found.append((work.flops, dims))
    for _, dims in sorted(found, key=lambda pair: pair[0]):
        yield dims


def largest(contract: Contract, device: torch.device) -> dict[str, int]:
    """Return the largest sizes that are tried."""
    *_, found = _sizes(contract, device)
    return found


def _pays_from(ratios: Sequence[tuple[int, float]]) -> int | None:
    """Return the least elements from which on no ratio is above `EVEN`; None if there are none."""
    found = None
    for elements, ratio in sorted(ratios, reverse=True):
        if ratio > EVEN:
            break
        found = elements
    # The smallest size that was tried stands for all below it.
    return 0 if found is not None and found == min(ratios)[0] else found
