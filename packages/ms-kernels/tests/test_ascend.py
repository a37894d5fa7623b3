"""The Ascend adapters without torch_npu: selection, limits and calls."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ms_kernels.core.choice import choose
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS
from ms_kernels.operators.rotary import ascend as rotary
from ms_kernels.operators.swiglu import ascend as gates

GOLDEN = Path(__file__).parent / "ascend" / "golden"
UNSUPPORTED = ("causal_conv1d", "gated_delta_rule")
"""Operators that torch_npu has no fitting kernel for, at any size."""
ADAPTERS = [
    impl
    for impl in IMPLEMENTATIONS
    if impl.backend == "ascend" and impl.operator not in UNSUPPORTED
]
OPERATORS = [impl.operator for impl in ADAPTERS]

LIMITS = [
    ("rms_norm", {"...": 0}, {}, "does not support empty tensors"),
    ("rotary", {"D": 896, "R/2": 448}, {}, "rotates at most 894 features, not 896"),
    ("rotary", {"Hq": 1000}, {}, "at most 999 rows and heads"),
    ("rotary", {"Hq": 1000}, {"interleaved": True}, "at most 999 rows and heads"),
    ("attention", {"D": 769}, {}, "heads of at most 768 features, not 769"),
    ("attention", {"Hq": 258}, {}, "at most 256 heads, not 258"),
    ("attention", {"Sk": 2**20 + 1}, {}, "at most 1048576 positions"),
    ("decode_attention", {"page": 24}, {}, "pages of a multiple of 16 positions, not 24"),
    ("decode_attention", {}, {"window": 7}, "does not support a window"),
    ("decode_attention", {"Hk": 64, "Hq": 64, "D": 1040}, {}, "heads of at most 512"),
    ("decode_attention", {"Hk": 256, "Hq": 256, "D": 512}, {}, "at most 65536 features"),
    ("cross_entropy", {}, {"label_smoothing": 0.1}, "not support label smoothing"),
    ("cross_entropy", {}, {"z_loss": 0.1}, "or a z-loss"),
    ("cross_entropy", {"...": 200_001}, {}, "at most 200000 rows, not 200001"),
    ("linear_cross_entropy", {"V": 127}, {}, "needs at least 128 classes, not 127"),
    ("linear_cross_entropy", {"H": 65_535}, {}, "up to 65534 features, not 65535"),
    ("linear_cross_entropy", {}, {"label_smoothing": 0.1}, "label smoothing or a z-loss"),
    ("token_log_probs", {}, {"temperature": 2.0}, "supports only temperature 1, not 2.0"),
    ("token_log_probs", {}, {"entropy": True}, "does not compute entropies"),
    ("permute_tokens", {"C": 513}, {}, "at most 512 choices per token, not 513"),
    ("permute_tokens", {"T": 2**23}, {}, "sorts at most 16777215 choices"),
    ("grouped_matmul", {"T": 0}, {}, "does not support empty tensors"),
]

DEEPSEEK_V3 = [
    ("rms_norm", {"...": 32_768, "H": 7168}, {}),
    (
        "rotary",
        {"B": 8, "C": 8, "S": 4096, "Hq": 128, "Hk": 1, "D": 64, "R/2": 32},
        {"interleaved": True},
    ),
    ("attention", {"Sq": 4096, "Sk": 4096, "Hq": 128, "Hk": 128, "D": 192, "Dv": 128}, {}),
    ("permute_tokens", {"T": 32_768, "C": 8, "H": 7168}, {"count": 256}),
    ("grouped_matmul", {"T": 262_144, "E": 256, "K": 7168, "N": 4096}, {}),
    ("unpermute_tokens", {"R": 262_144, "T": 32_768, "C": 8, "H": 7168}, {}),
    ("linear_cross_entropy", {"...": 32_768, "H": 7168, "V": 129_280}, {}),
]
"""A batch of 8 rows of 4,096 tokens with the sizes of DeepSeek-V3's config.json."""


class NpuDevice(NamedTuple):
    """A device that torch cannot name until torch_npu is imported."""

    type: str = "npu"


def on_npu(call):
    """Describe the same call on an NPU."""
    tensors = (
        tensor if tensor is None else tensor._replace(device=NpuDevice()) for tensor in call.tensors
    )
    return call._replace(tensors=tuple(tensors))


def npu_call(operator, dims=(), **options):
    """Describe a call on an NPU, in bfloat16 where the adapter supports it."""
    (adapter,) = [impl for impl in ADAPTERS if impl.operator == operator]
    half = torch.bfloat16 in adapter.dtypes
    dtype = torch.bfloat16 if half else torch.float32
    contract = CONTRACTS[operator]
    return on_npu(contract.call(dict(dims), dtype=dtype, options=options))


def test_importing_the_adapters_does_not_import_torch_npu():
    """The adapters import it lazily, so it may be missing."""
    script = "import sys; sys.modules['torch_npu'] = None; import ms_kernels.operators"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_npu_gets_the_fused_operator(operator):
    """The choice uses a description of the call, so it needs no NPU."""
    choice = choose(npu_call(operator), IMPLEMENTATIONS)
    assert choice.backend == "ascend"
    wide = CONTRACTS[operator].call({}, dtype=torch.float64)
    assert choose(on_npu(wide), IMPLEMENTATIONS).backend != "ascend"
    assert choose(CONTRACTS[operator].call({}, device="cuda"), IMPLEMENTATIONS).backend != "ascend"


@pytest.mark.parametrize("operator", UNSUPPORTED)
def test_operators_without_a_torch_npu_kernel_are_refused_by_name(operator):
    """The verdict names torch_npu's operator and its limitation; the reference takes the call."""
    contract = CONTRACTS[operator]
    for dtype in (torch.float32, torch.bfloat16):
        choice = choose(on_npu(contract.call({}, dtype=dtype)), IMPLEMENTATIONS)
        assert choice.backend == "reference"
        reasons = {verdict.backend: verdict.reason for verdict in choice.verdicts}
        assert "has no fitting kernel: npu_" in reasons["ascend"]
        assert "triton" in reasons["triton"]


@pytest.mark.parametrize(("operator", "dims", "options", "reason"), LIMITS)
def test_cann_limits_are_checked_before_the_call(operator, dims, options, reason):
    """Sizes are not checked by torch_npu's Meta kernels, so the adapters check them."""
    choice = choose(npu_call(operator, dims, **options), IMPLEMENTATIONS)
    assert choice.backend != "ascend"
    (npu_verdict,) = [v for v in choice.verdicts if v.backend == "ascend"]
    assert reason in npu_verdict.reason


@pytest.mark.parametrize(("operator", "dims", "options"), DEEPSEEK_V3)
def test_deepseek_v3_sizes_are_supported(operator, dims, options):
    """None of its operators, interleaved rotary included, falls back to plain torch."""
    assert choose(npu_call(operator, dims, **options), IMPLEMENTATIONS).backend == "ascend"


def backend_with_weights(operator, dtype):
    """Return the backend for a bfloat16 call whose last tensor has another dtype."""
    call = npu_call(operator)
    tensors = (*call.tensors[:-1], call.tensors[-1]._replace(dtype=dtype))
    return choose(call._replace(tensors=tensors), IMPLEMENTATIONS).backend


def test_unsupported_weight_dtypes_are_refused():
    """RMSNorm takes weights of x's dtype or float32; with a residual only x's dtype."""
    for operator, dtype in (("rms_norm", torch.float16), ("add_rms_norm", torch.float32)):
        assert backend_with_weights(operator, dtype) != "ascend"


def test_float32_router_weights_are_supported():
    """Bfloat16 rows are summed with weights of any dtype except float64, which CANN lacks."""
    assert backend_with_weights("unpermute_tokens", torch.float32) == "ascend"
    assert backend_with_weights("unpermute_tokens", torch.float64) != "ascend"


class CalledError(Exception):
    """Raised when an operator of torch_npu is called with valid arguments."""


class FakeNamespace:
    """A fake `torch.ops.npu` that checks each call against its schema and stops there."""

    def __init__(self):
        lines = (GOLDEN / "schemas.txt").read_text().splitlines()
        parsed = [torch._C.parse_schema(line) for line in lines]
        self.schemas = {schema.name.removeprefix("npu::"): schema for schema in parsed}

    def __getattr__(self, name):
        return lambda *args, **kwargs: check_call(self.schemas[name], args, kwargs)


def check_call(schema, args, kwargs):
    """Check arguments like the dispatcher: by position, name and type."""
    slots = schema.arguments
    assert len(args) <= sum(not slot.kwarg_only for slot in slots)
    bound = dict(zip((slot.name for slot in slots), args, strict=False))
    assert not bound.keys() & kwargs.keys()
    bound |= kwargs
    assert bound.keys() <= {slot.name for slot in slots}
    for slot in slots:
        assert slot.name in bound or slot.has_default_value()
        if bound.get(slot.name) is not None:
            assert isinstance(bound[slot.name], python_types(str(slot.type))), slot.name
    raise CalledError(schema.name)


def python_types(name):
    """Return the Python types accepted for a schema type."""
    name = name.removeprefix("Optional[").rstrip("]")
    if name.startswith("List["):
        return list
    return {"Tensor": torch.Tensor, "int": int, "float": float, "str": str, "bool": bool}[name]


@pytest.mark.parametrize("implementation", ADAPTERS, ids=OPERATORS)
def test_adapter_calls_match_torch_npu_schemas(implementation, monkeypatch):
    """The golden file has the wheel's schemas; every option value is tried."""
    contract = CONTRACTS[implementation.operator]
    if implementation.operator == "layer_norm":
        pytest.skip("it uses torch's own operator")
    monkeypatch.setattr(torch.ops, "npu", FakeNamespace())
    dtype = torch.bfloat16 if torch.bfloat16 in implementation.dtypes else torch.float32
    trials = [{}, *({option.name: value} for option in contract.options for value in option.trials)]
    for trial in trials:
        tensors = contract.draw({}, dtype=dtype).values()
        options = [trial.get(option.name, option.default) for option in contract.options]
        with pytest.raises(CalledError):
            implementation.run(*tensors, *options)


def test_adjacent_halves_are_joined_without_a_copy():
    """Two halves of one projection are passed as one tensor; other pairs are copied."""
    projection = torch.randn(3, 5, 16)
    gate, up = projection.chunk(2, -1)
    joined = gates.concat_gate_up(gate, up)
    assert joined.data_ptr() == projection.data_ptr()
    assert torch.equal(joined, projection)
    rows = torch.randn(6, 40)[:, 4:36].unflatten(0, (2, 3)).chunk(2, -1)
    assert gates.concat_gate_up(*rows).data_ptr() == rows[0].data_ptr()
    non_adjacent = [
        (up, gate),
        (gate, up.contiguous()),
        (gate, gate),
        (gate[..., ::2], up[..., ::2]),
    ]
    for first, second in non_adjacent:
        assert torch.equal(gates.concat_gate_up(first, second), torch.cat((first, second), -1))


def test_widened_tables_are_cached_until_they_change():
    """An angle table is widened once for all layers of a step and again after a write to it."""
    table = torch.randn(1, 4, 3)
    wide = rotary._widen(table, False)
    assert torch.equal(wide, torch.cat((table, table), -1).unsqueeze(2))
    assert rotary._widen(table, False) is wide
    interleaved = rotary._widen(table, True)
    assert torch.equal(interleaved, table.repeat_interleave(2, -1).unsqueeze(2))
    table.mul_(2)
    assert torch.equal(rotary._widen(table, True), 2 * interleaved)
