"""Everything that exists, on this machine's accelerator: proofs, times, memory, in one table.

python benchmarks/gpu.py [--out table.md]     # needs ms-kernels on the path, nothing else
python benchmarks/gpu.py --dry-run            # tiny sizes on the CPU: does the script work?

Times are medians of rounds in which all ways have their turn, between two events. Bandwidth and
FLOP rates divide the contract's least work by them, beside a copy and a matrix product measured
here. Each section is written as it ends; one that fails says why, and the next one runs. Exit code
0 when all proofs hold and nothing failed, 1 otherwise, 2 where there is no accelerator.
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import field, frozen, mutable
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ms_kernels
from ms_kernels import ops
from ms_kernels.check import check
from ms_kernels.dispatch import CONTRACTS, IMPLEMENTATIONS, describe_call, use_backend
from ms_kernels.measure import in_turn, one_pass
from ms_kernels.registry import obstacle_to

ENDS_S = 560.0
"""Sections that would begin later than this after the start are left out, and told."""

SIZES = {
    "rms_norm": {"...": 8192, "H": 4096},
    "add_rms_norm": {"...": 8192, "H": 4096},
    "layer_norm": {"...": 8192, "H": 4096},
    "rotary": {"B": 4, "S": 4096, "Hq": 32, "Hk": 8, "D": 128, "R/2": 64},
    "swiglu": {"...": 8192, "I": 14336},
    "geglu": {"...": 8192, "I": 14336},
    "cross_entropy": {"...": 8192, "V": 128256},
    "permute_tokens": {"T": 16384, "C": 2, "H": 4096},
    "unpermute_tokens": {"R": 32768, "T": 16384, "C": 2, "H": 4096},
    "adamw_step": {"...": 2**28},
    "grouped_matmul": {"T": 16384, "E": 8, "K": 4096, "N": 14336},
    "quantized_linear": {"...": 16, "K": 4096, "P": 2048, "G": 128, "N": 14336},
    "decode_attention": {
        "B": 32, "Hq": 32, "Hk": 8, "D": 128, "P": 8192, "page": 16, "N": 256,
    },
}  # fmt: skip
"""Large shapes of the operators that memory or one product bounds."""

MEMORY_BOUND = tuple(list(SIZES)[:10])


@mutable(kw_only=True)
class Report:
    """The table, written as it grows."""

    device: torch.device
    small: bool
    out: Path | None
    started: float = field(factory=time.monotonic)
    held: bool = True
    lines: list[str] = field(factory=list)

    def add(self, *lines: str) -> None:
        """Print lines and append them to the file."""
        self.lines += lines
        print("\n".join(lines), flush=True)
        if self.out:
            self.out.write_text("\n".join(self.lines) + "\n")

    def table(self, *columns: str) -> None:
        """Begin a table."""
        self.add("", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")

    def row(self, *cells: object) -> None:
        """Add a row of a table."""
        self.add(f"| {' | '.join(str(each) for each in cells)} |")

    def section(self, name: str, body: Callable[["Report"], None]) -> None:
        """Run a section; what goes wrong in it is told and ends it alone."""
        self.add("", f"## {name}")
        if time.monotonic() - self.started > ENDS_S:
            self.held = False
            self.add("", "left out: the time was up")
            return
        began = time.monotonic()
        try:
            body(self)
        except Exception as error:  # whatever it is, the other sections still run
            self.held = False
            told = traceback.extract_tb(error.__traceback__)[-1]
            reason = (str(error).splitlines() or [""])[0][:300]
            self.add("", f"**failed** at {told.name}: {type(error).__name__}: {reason}")
        finally:
            if not self.small:
                torch.accelerator.synchronize()
                torch.accelerator.empty_cache()
        self.add("", f"({time.monotonic() - began:.0f} s)")


@frozen(kw_only=True)
class Ceilings:
    """What the device was seen to do."""

    copy_rate: float
    product_rate: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu")
    if not options.dry_run:
        if not torch.accelerator.is_available():
            print("gpu.py: there is no accelerator here, or torch was built without one")
            return 2
        device = torch.device(torch.accelerator.current_accelerator().type, 0)
    report = Report(device=device, small=options.dry_run, out=options.out)
    report.add("# ms-kernels on an accelerator", "", _versions(device))
    ceilings: list[Ceilings] = []
    for name, body in (
        ("Proofs", prove),
        ("Ceilings", lambda each: ceilings.append(measure_ceilings(each))),
        ("The library built ahead of time", launch_library),
        ("Operators bound by memory", lambda each: memory_bound(each, *ceilings)),
        ("Linear cross-entropy", lambda each: linear_cross_entropy(each, *ceilings)),
        ("Attention, beside each of torch's kernels", attention),
        ("A Llama block, trained", llama_block),
        ("Other operators", lambda each: other_operators(each, *ceilings)),
        ("Where our own attention alone can go", masked_attention),
    ):
        report.section(name, body)
    report.add("", f"{time.monotonic() - report.started:.0f} s in all; all held: {report.held}")
    return 0 if report.held else 1


def _versions(device: torch.device) -> str:
    module = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else str(device)
    known = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    known.append(f"ms-kernels {ms_kernels.__version__}")
    for package in ("triton", "liger-kernel"):
        try:
            known.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            known.append(f"no {package}")
    return f"{time.strftime('%Y-%m-%d')}, {name}; {', '.join(known)}"


def prove(report: Report) -> None:
    """Check every backend in three dtypes, and note what does not hold."""
    report.table("dtype", "backend", "hold", "fail")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for backend in ("triton", "sdpa", "reference") if not report.small else ("cpu",):
            findings = [each for each in _each_operator(report, backend, dtype) if not each.reason]
            wrong = [each for each in findings if not each.holds]
            told = "; ".join(
                f"{each.operator} {each.options} {each.part}: {each.share:.3g}" for each in wrong
            )
            report.held &= not wrong
            name = str(dtype).removeprefix("torch.")
            report.row(name, backend, len(findings) - len(wrong), told or 0)


def _each_operator(report: Report, backend: str, dtype: torch.dtype) -> Iterator:
    """Check operator by operator, so that one that fails to run does not hide the others."""
    for operator in CONTRACTS:
        try:
            yield from check([operator], [backend], device=report.device, dtype=dtype)
        except Exception as error:
            report.held = False
            reason = (str(error).splitlines() or [""])[0][:200]
            report.row(dtype, backend, f"{operator} raised", f"{type(error).__name__}: {reason}")


def measure_ceilings(report: Report) -> Ceilings:
    """Measure a copy and a bfloat16 product: what nothing can be faster than."""
    size = 2**16 if report.small else 2**31
    side = 64 if report.small else 8192
    block = torch.empty(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(block)
    square = torch.randn(side, side, device=report.device, dtype=torch.bfloat16)
    took = in_turn(
        {"copy": lambda: target.copy_(block), "product": lambda: square @ square}, report.device
    )
    found = Ceilings(copy_rate=2 * size / took["copy"], product_rate=2 * side**3 / took["product"])
    report.add(
        "",
        f"Copy {found.copy_rate / 1e9:.0f} GB/s; "
        f"bfloat16 product {found.product_rate / 1e12:.0f} TFLOP/s.",
    )
    return found


def _sizes(report: Report, operator: str) -> dict[str, int]:
    return {} if report.small else SIZES.get(operator, {})


def _ours(report: Report) -> tuple[str, ...]:
    """Backends whose times count as ours, best first."""
    return ("cpu",) if report.small else ("sdpa", "triton")


def _ways(report: Report, operator: str, sizes: dict, dtype: torch.dtype) -> tuple:
    """Return ways to do one operator by name, the call's tensors and its options."""
    contract = CONTRACTS[operator]
    drawn = contract.draw(sizes, dtype=dtype, device=report.device)
    spare = [argument.name for argument in contract.arguments if argument.optional]
    inputs = tuple(None if name in spare else tensor for name, tensor in drawn.items())
    call = describe_call(contract, inputs, contract.defaults)
    ways = {}
    for each in IMPLEMENTATIONS:
        fits = each.operator == operator and obstacle_to(each, call) is None
        if fits and each.backend in _ours(report):
            ways[each.backend] = each.run
    if not report.small:
        ways["torch.compile"] = torch.compile(contract.reference, dynamic=False)
    ways |= dict(_liger(operator, inputs))
    return ways, inputs, contract


def _liger(operator: str, inputs: tuple) -> Iterator[tuple[str, Callable]]:
    """Yield Liger's way, where it is installed and has one, in our arguments."""
    if importlib.util.find_spec("liger_kernel") is None or inputs[0].device.type == "cpu":
        return
    if operator == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

        yield "Liger", lambda x, w, eps: Function.apply(x, w, eps, 0.0, "llama", False)
    elif operator == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Function

        zeros = torch.zeros_like(inputs[1])
        yield "Liger", lambda x, w, b, eps: Function.apply(x, w, zeros if b is None else b, eps)
    elif operator == "swiglu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function

        yield "Liger", lambda gate, up: Function.apply(gate, up)
    elif operator == "geglu":
        from liger_kernel.ops.geglu import LigerGELUMulFunction as Function

        yield "Liger (tanh)", lambda gate, up, approximate: Function.apply(gate, up)
    elif operator == "cross_entropy":
        from liger_kernel.transformers.functional import liger_cross_entropy

        # It writes the gradient into the logits, so it gets a copy; the copy's time is told too.
        yield (
            "Liger (writes into its input: with a copy)",
            lambda logits, targets, *rest: liger_cross_entropy(logits.clone(), targets),
        )


def memory_bound(report: Report, ceilings: Ceilings) -> None:
    """Time the operators that memory bounds, as shares of the copy's rate."""
    report.table("operator", "pass", "way", "us", "GB/s", "of copy", "times torch.compile")
    for operator in MEMORY_BOUND:
        try:
            _bound_by_memory(report, operator, ceilings)
        except Exception as error:
            report.held = False
            report.row(operator, "failed", (str(error).splitlines() or [""])[0][:200])


def _bound_by_memory(report: Report, operator: str, ceilings: Ceilings) -> None:
    ways, inputs, contract = _ways(report, operator, _sizes(report, operator), torch.bfloat16)
    dims = contract.bind(describe_call(contract, inputs, contract.defaults))
    forward, backward = contract.forward(dims, 2), contract.backward(dims, 2)
    for told, both in (("forward", False), ("forward and backward", True)):
        if both and not backward.size_bytes:
            continue
        steps, failed = {}, {}
        for name, run in ways.items():
            step = one_pass(contract, run, inputs, contract.defaults, backward=both)
            try:
                step()
                steps[name] = step
            except Exception as error:
                failed[name] = (str(error).splitlines() or [""])[0][:120]
        took = in_turn(steps, report.device, spend_s=0.15)
        size = forward.size_bytes + (backward.size_bytes if both else 0)
        for name, seconds in took.items():
            rate = size / seconds
            compiled = took.get("torch.compile", float("nan")) / seconds
            share = f"{rate / ceilings.copy_rate:.0%}"
            report.row(
                operator, told, name, f"{1e6 * seconds:.1f}", f"{rate / 1e9:.0f}", share,
                f"{compiled:.2f}",
            )  # fmt: skip
        for name, reason in failed.items():
            report.row(operator, told, name, "failed", reason, "", "")


def linear_cross_entropy(report: Report, ceilings: Ceilings) -> None:
    """Time it beside its floor, torch's own and Liger's, with memory and losses."""
    rows, width, classes = (64, 32, 256) if report.small else (8192, 4096, 128256)
    dtype = torch.float32 if report.small else torch.bfloat16
    hidden = torch.randn(rows, width, device=report.device, dtype=dtype).requires_grad_()
    weight = torch.randn(classes, width, device=report.device, dtype=dtype) * width**-0.5
    weight.requires_grad_()
    targets = torch.randint(classes, (rows,), device=report.device)
    floor = 6 * rows * width * classes / ceilings.product_rate
    report.add("", f"{rows} x {width} x {classes}, {dtype}; three products: {1e3 * floor:.2f} ms.")

    def plain() -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), targets)

    losses = {"ms_kernels": lambda: ops.linear_cross_entropy(hidden, weight, targets)}
    losses["plain torch"] = plain
    if hasattr(F, "linear_cross_entropy"):
        losses["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, targets)
    if not report.small:
        losses["torch.compile"] = torch.compile(plain)
        if importlib.util.find_spec("liger_kernel") is not None:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            losses["Liger"] = lambda: liger_fused_linear_cross_entropy(hidden, weight, targets)
    truth = None
    if not report.small:
        with torch.no_grad():
            parts = [
                F.cross_entropy(part.float() @ weight.float().T, wanted, reduction="sum").double()
                for part, wanted in zip(hidden.split(1024), targets.split(1024), strict=True)
            ]
        truth = float(sum(parts)) / rows
    report.table("way", "ms", "times floor", "extra MiB", "loss", "off the float32 loss")
    steps = {}
    for name, loss in losses.items():

        def step(loss: Callable[[], Tensor] = loss) -> object:
            return torch.autograd.grad(loss(), (hidden, weight))

        try:
            step()
            steps[name] = step
        except Exception as error:
            report.row(name, "failed", (str(error).splitlines() or [""])[0][:150], "", "", "")
    took = in_turn(steps, report.device, spend_s=1.0, rounds=3)
    for name, seconds in took.items():
        value = losses[name]().detach().item()
        off = f"{value - truth:+.5f}" if truth is not None else ""
        extra = f"{_extra_mib(report, steps[name]):.0f}"
        report.row(
            name, f"{1e3 * seconds:.2f}", f"{seconds / floor:.2f}", extra, f"{value:.5f}", off
        )


def attention(report: Report) -> None:
    """Time the chosen kernel, ours, and each of torch's, forward and with gradients."""
    shapes = [(1, 64, 4, 2, 16)] if report.small else [
        (4, 4096, 32, 8, 128), (1, 16384, 32, 8, 128), (8, 2048, 32, 32, 64),
    ]  # fmt: skip
    dtype = torch.float32 if report.small else torch.bfloat16
    report.table("B S Hq Hk D", "pass", "way", "ms", "TFLOP/s", "of the best of torch's")
    for batch, length, heads, groups, width in shapes:
        q, k, v = (
            torch.randn(
                batch, length, each, width, device=report.device, dtype=dtype
            ).requires_grad_()
            for each in (heads, groups, groups)
        )
        steps: dict[str, Callable[[], Tensor]] = {
            "ms_kernels, as chosen": lambda q=q, k=k, v=v: ops.attention(q, k, v)
        }
        if not report.small:
            steps["ms_kernels, triton"] = lambda q=q, k=k, v=v: _forced("triton", q, k, v)
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            steps[backend] = lambda q=q, k=k, v=v, b=backend: _sdpa(getattr(SDPBackend, b), q, k, v)
        flops = 2 * batch * heads * length * length * width
        for told, both in (("forward", False), ("forward and backward", True)):
            ways = {}
            for name, run in steps.items():
                way = _both_ways(run, (q, k, v)) if both else run
                try:
                    way()
                    ways[name] = way
                except Exception:  # a kernel that this chip or build lacks
                    continue
            took = in_turn(ways, report.device, spend_s=0.3)
            best = min((s for name, s in took.items() if name.isupper()), default=float("nan"))
            for name, seconds in took.items():
                rate = flops * (3.5 if both else 1) / seconds / 1e12
                cells = (f"{1e3 * seconds:.3f}", f"{rate:.0f}", f"{best / seconds:.0%}")
                report.row(f"{batch} {length} {heads} {groups} {width}", told, name, *cells)


def _forced(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with use_backend(backend):
        return ops.attention(q, k, v)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        heads = (each.transpose(1, 2) for each in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=grouped)


def _both_ways(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    def step() -> object:
        result = run()
        return torch.autograd.grad(result, leaves, torch.ones_like(result))

    return step


def masked_attention(report: Report) -> None:
    """Time windows and documents, which torch's kernels do not take, beside full attention."""
    batch, length, heads, groups, width = (
        (1, 64, 4, 2, 16) if report.small else (1, 16384, 32, 8, 128)
    )
    dtype = torch.float32 if report.small else torch.bfloat16
    q, k, v = (
        torch.randn(batch, length, each, width, device=report.device, dtype=dtype).requires_grad_()
        for each in (heads, groups, groups)
    )
    documents = torch.arange(length, device=report.device).div(length // 8, rounding_mode="floor")
    documents = documents.int().expand(batch, length).contiguous()
    ways = {
        "causal": lambda: ops.attention(q, k, v),
        f"window {length // 16}": lambda: ops.attention(q, k, v, window=length // 16),
        "8 documents": lambda: ops.attention(q, k, v, documents=documents),
    }
    took = in_turn(
        {name: _both_ways(run, (q, k, v)) for name, run in ways.items()}, report.device, spend_s=0.3
    )
    report.table("mask", "forward and backward, ms")
    for name, seconds in took.items():
        report.row(name, f"{1e3 * seconds:.3f}")


class Block(nn.Module):
    """A block of Llama, its operators passed in."""

    def __init__(self, operators: object, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.operators, self.heads, self.groups, self.head = (
            operators,
            heads,
            groups,
            width // heads,
        )
        self.first, self.second = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's result; x is (B, S, H)."""
        batch, length, _ = x.shape
        normed = self.operators.rms_norm(x, self.first)
        q = self.query(normed).view(batch, length, self.heads, self.head)
        kv = self.key_value(normed).view(batch, length, 2 * self.groups, self.head)
        k, v = kv.split(self.groups, dim=2)
        q, k = self.operators.rotary(q, k, cos, sin)
        mixed = self.operators.attention(q, k, v).reshape(batch, length, -1)
        normed, x = self.operators.add_rms_norm(self.output(mixed), x, self.second)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(self.operators.swiglu(gate, up))


class Plain:
    """What a careful user writes in torch, for torch.compile to fuse."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        """Normalise rows."""
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add and normalise rows."""
        x = x + residual
        return F.rms_norm(x, weight.shape, weight, 1e-6), x

    @staticmethod
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn q and k."""
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        turned = []
        for each in (q, k):
            one, two = each.float().chunk(2, dim=-1)
            pair = (one * cos - two * sin, two * cos + one * sin)
            turned.append(torch.cat(pair, dim=-1).to(each.dtype))
        return turned[0], turned[1]

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally."""
        heads = (each.transpose(1, 2) for each in (q, k, v))
        result = F.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
        )
        return result.transpose(1, 2)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        """Gate."""
        return F.silu(gate) * up


def llama_block(report: Report) -> None:
    """Train one block, ours and plain, eager and compiled."""
    width, heads, groups, inner = (32, 4, 2, 64) if report.small else (4096, 32, 8, 14336)
    batch, length = (2, 16) if report.small else (2, 4096)
    dtype = torch.float32 if report.small else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(batch, length, width, device=report.device, dtype=dtype).requires_grad_()
    half = width // heads // 2
    place = torch.arange(length, device=report.device).float()
    turns = torch.outer(place, 10000.0 ** -(torch.arange(half, device=report.device) / half))[None]
    cos, sin = turns.cos(), turns.sin()
    state = None
    steps, results = {}, {}
    for name, operators, compiled in (
        ("plain", Plain, False),
        ("plain, compiled", Plain, True),
        ("ms_kernels", ops, False),
        ("ms_kernels, compiled", ops, True),
    ):
        if report.small and compiled:
            continue
        block = Block(operators, width, heads, groups, inner).to(report.device, dtype)
        state = state or block.state_dict()
        block.load_state_dict(state)
        run = torch.compile(block) if compiled else block

        def step(run: Callable = run, block: nn.Module = block) -> Tensor:
            result = run(x, cos, sin)
            block.zero_grad(set_to_none=True)
            result.backward(torch.ones_like(result))
            x.grad = None
            return result.detach()

        try:
            results[name] = step()
            steps[name] = step
        except Exception as error:
            report.row(name, "failed", (str(error).splitlines() or [""])[0][:200])
    took = in_turn(steps, report.device, spend_s=1.0, rounds=3)
    report.table("way", "ms", "times faster than plain, compiled", "extra MiB", "off plain")
    base = took.get("plain, compiled", took["plain"])
    for name, seconds in took.items():
        off = (results[name].float() - results["plain"].float()).abs().max().item()
        extra = f"{_extra_mib(report, steps[name]):.0f}"
        report.row(name, f"{1e3 * seconds:.3f}", f"{base / seconds:.2f}", extra, f"{off:.3g}")


def other_operators(report: Report, ceilings: Ceilings) -> None:
    """Time what is bound by products or by reading packed or paged memory."""
    report.table("operator", "pass", "way", "us", "GB/s", "TFLOP/s")
    for operator in ("decode_attention", "quantized_linear", "grouped_matmul"):
        ways, inputs, contract = _ways(report, operator, _sizes(report, operator), torch.bfloat16)
        # A compiled reference of these multiplies every expert, or unpacks all of the weight.
        dims = contract.bind(describe_call(contract, inputs, contract.defaults))
        for told, both in (("forward", False), ("forward and backward", True)):
            work = contract.forward(dims, 2)
            if both and operator != "grouped_matmul":
                continue
            if both:
                more = contract.backward(dims, 2)
                work = type(work)(work.size_bytes + more.size_bytes, work.flops + more.flops)
            steps = {}
            for name, run in ways.items():
                step = one_pass(contract, run, inputs, contract.defaults, backward=both)
                try:
                    step()
                    steps[name] = step
                except Exception as error:
                    reason = (str(error).splitlines() or [""])[0][:120]
                    report.row(operator, told, name, "failed", reason, "")
            for name, seconds in in_turn(steps, report.device, spend_s=0.2).items():
                rates = (
                    f"{work.size_bytes / seconds / 1e9:.0f}",
                    f"{work.flops / seconds / 1e12:.1f}",
                )
                report.row(operator, told, name, f"{1e6 * seconds:.1f}", *rates)


def _extra_mib(report: Report, step: Callable[[], object]) -> float:
    """Return the peak memory of one pass beyond what was there before."""
    if report.small:
        return float("nan")
    step()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    return (torch.accelerator.max_memory_allocated() - before) / 2**20


PROGRAM = r"""
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "ms_kernels.h"

enum { ROWS = 3, WIDTH = 4096, COUNT = ROWS * WIDTH };
typedef unsigned long long address;

int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*start)(unsigned) = dlsym(driver, "cuInit");
    int (*retain)(void **, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*select)(void *) = dlsym(driver, "cuCtxSetCurrent");
    int (*get)(address *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    int (*put)(address, const void *, size_t) = dlsym(driver, "cuMemcpyHtoD_v2");
    int (*take)(void *, address, size_t) = dlsym(driver, "cuMemcpyDtoH_v2");
    static float x[COUNT], weight[WIDTH], y[COUNT];
    void *context = NULL;
    address at[4];
    if (ms_scale_cast_fp32(NULL, (void *)64, (void *)64, (void *)64, 16, 1.0f) != MS_NO_DEVICE)
        return 80; /* no context is current yet */
    if (start(0) || retain(&context, 0) || select(context)) return 81;
    size_t sizes[4] = {sizeof x, sizeof weight, sizeof y, ROWS * sizeof(float)};
    for (int i = 0; i < 4; i++) if (get(&at[i], sizes[i])) return 82;
    for (int i = 0; i < COUNT; i++) x[i] = (float)(i % 29) - 14;
    for (int i = 0; i < WIDTH; i++) weight[i] = 1 + 1e-4f * i;
    if (put(at[0], x, sizeof x) || put(at[1], weight, sizeof weight)) return 83;
    ms_status status = ms_rms_norm_forward_fp32_4096(NULL, (void *)at[0], (void *)at[0],
        (void *)at[1], (void *)at[2], (void *)at[2], (void *)at[3], ROWS, WIDTH, WIDTH, WIDTH,
        1e-6f);
    if (status) { printf("%s: %s\n", ms_status_text(status), ms_last_error()); return 84; }
    if (take(y, at[2], sizeof y)) return 85;
    double worst = 0;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < WIDTH; i++) sum += (double)x[r * WIDTH + i] * x[r * WIDTH + i];
        double scale = 1 / sqrt(sum / WIDTH + 1e-6);
        for (int i = 0; i < WIDTH; i++) {
            double off = fabs(y[r * WIDTH + i] - x[r * WIDTH + i] * scale * weight[i]);
            if (off > worst) worst = off;
        }
    }
    printf("largest error %.3g\n", worst);
    return worst < 1e-5 ? 0 : 86;
}
"""


def launch_library(report: Report) -> None:
    """Build the library of this chip, run a kernel of it from Python and from a C program."""
    from ms_kernels.aot import TARGETS, build, load
    from ms_kernels.tuning import chip_of

    chip = "sm_90" if report.small else chip_of(report.device)
    if chip not in TARGETS or importlib.util.find_spec("triton") is None:
        report.add("", f"not tried: no target {chip}, or triton is not installed")
        return
    if shutil.which("cc") is None:
        report.held = False
        report.add("", "not tried: there is no C compiler")
        return
    with tempfile.TemporaryDirectory() as folder:
        only = ["rms_norm_forward_fp32_4096", "scale_cast_fp32"]
        place = build(chip, Path(folder) / "lib", only=only)
        if report.small:
            report.add("", "built; a launch needs the chip")
            return
        _launch_from_python(report, load(place))
        if TARGETS[chip].backend != "cuda":
            return
        source, program = Path(folder) / "main.c", Path(folder) / "main"
        source.write_text(PROGRAM)
        command = ["cc", str(source), "-I", str(place), str(place / "libms_kernels.so")]
        command += [f"-Wl,-rpath,{place}", "-ldl", "-lm", "-o", str(program)]
        subprocess.run(command, check=True)
        ended = subprocess.run([program], capture_output=True, text=True, timeout=60)
        report.held &= ended.returncode == 0
        report.add("", f"From C: exit code {ended.returncode}, {ended.stdout.strip()}")


def _launch_from_python(report: Report, library: object) -> None:
    x = torch.randn(8, 4096, device=report.device)
    weight, y = torch.randn(4096, device=report.device), torch.empty_like(x)
    scale = torch.empty(8, device=report.device)
    names = {"X": x, "RESIDUAL": x, "W": weight, "Y": y, "SUM": y, "SCALE": scale}
    stream = torch.accelerator.current_stream(report.device)
    library.launch(
        "rms_norm_forward_fp32_4096",
        stream=getattr(stream, "cuda_stream", None) or getattr(stream, "native_handle", 0) or 0,
        **{name: each.data_ptr() for name, each in names.items()},
        rows=8, width=4096, x_stride=4096, residual_stride=4096, eps=1e-6,
    )  # fmt: skip
    torch.accelerator.synchronize()
    off = (y - CONTRACTS["rms_norm"].reference(x, weight, 1e-6)).abs().max().item()
    report.held &= off < 1e-4
    report.add("", f"From Python, by ctypes: largest error {off:.3g}")


if __name__ == "__main__":
    sys.exit(main())
