"""The Ascend adapters where there is no torch_npu: their choice, limits and calls."""

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
REFUSED = ("causal_conv1d", "gated_delta_rule")
"""Operators for which torch_npu has nothing that fits, at any sizes."""
ADAPTERS = [
    each for each in IMPLEMENTATIONS if each.backend == "ascend" and each.operator not in REFUSED
]
OPERATORS = [each.operator for each in ADAPTERS]

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
    ("cross_entropy", {}, {"label_smoothing": 0.1}, "no label smoothing"),
    ("cross_entropy", {}, {"z_loss": 0.1}, "no z-loss"),
    ("cross_entropy", {"...": 200_001}, {}, "at most 200000 rows, not 200001"),
    ("linear_cross_entropy", {"V": 127}, {}, "needs at least 128 classes, not 127"),
    ("linear_cross_entropy", {"H": 65_535}, {}, "up to 65534 features, not 65535"),
    ("linear_cross_entropy", {}, {"label_smoothing": 0.1}, "no label smoothing and no z-loss"),
    ("token_log_probs", {}, {"temperature": 2.0}, "supports only temperature 1, not 2.0"),
    ("token_log_probs", {}, {"entropy": True}, "does not compute entropies"),
    ("permute_tokens", {"C": 513}, {}, "at most 512 choices per token, not 513"),
    ("permute_tokens", {"T": 2**23}, {}, "sorts at most 16777215 choices"),
    ("grouped_matmul", {"T": 0}, {}, "does not support empty tensors"),
    ("quantized_linear", {"G": 4}, {"group_size": 16}, "groups of a multiple of 32"),
    ("quantized_linear", {"N": 44}, {}, "a multiple of 8 results at 4 bits, not 44"),
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
"""A batch of 8 rows of 4,096 tokens at the sizes of its config.json."""


class Npu(NamedTuple):
    """A device that torch cannot name before torch_npu is imported."""

    type: str = "npu"


def on_an_npu(call):
    """Describe the same call on an NPU."""
    tensors = (each if each is None else each._replace(device=Npu()) for each in call.tensors)
    return call._replace(tensors=tuple(tensors))


def npu_call(operator, dims=(), **options):
    """Describe a call on an NPU, in bfloat16 where the adapter takes it."""
    (implementation,) = [each for each in ADAPTERS if each.operator == operator]
    half = torch.bfloat16 in implementation.dtypes
    dtype = torch.bfloat16 if half else torch.float32
    contract = CONTRACTS[operator]
    return on_an_npu(contract.call(dict(dims), dtype=dtype, options=options))


def test_to_import_the_adapters_imports_no_torch_npu():
    """Where torch_npu is installed it is left alone; where it is not, nothing is missed."""
    script = "import sys; sys.modules['torch_npu'] = None; import ms_kernels.operators"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_npu_gets_the_fused_operator_and_says_why(operator):
    """The choice is made from a description, on a machine that has no NPU."""
    choice = choose(npu_call(operator), IMPLEMENTATIONS)
    assert choice.backend == "ascend"
    wide = CONTRACTS[operator].call({}, dtype=torch.float64)
    assert choose(on_an_npu(wide), IMPLEMENTATIONS).backend != "ascend"
    assert choose(CONTRACTS[operator].call({}, device="cuda"), IMPLEMENTATIONS).backend != "ascend"


@pytest.mark.parametrize("operator", REFUSED)
def test_what_torch_npu_has_nothing_for_is_refused_by_name(operator):
    """The verdict names torch_npu's operator and what it lacks; the reference takes the call."""
    contract = CONTRACTS[operator]
    for dtype in (torch.float32, torch.bfloat16):
        choice = choose(on_an_npu(contract.call({}, dtype=dtype)), IMPLEMENTATIONS)
        assert choice.backend == "reference"
        reasons = {each.backend: each.reason for each in choice.verdicts}
        assert "has no fitting kernel: npu_" in reasons["ascend"]
        assert "triton" in reasons["triton"]


@pytest.mark.parametrize(("operator", "dims", "options", "told"), LIMITS)
def test_what_cann_documents_as_a_limit_is_refused_beforehand(operator, dims, options, told):
    """torch_npu's Meta kernels check no sizes; the adapters do, and another backend is taken."""
    choice = choose(npu_call(operator, dims, **options), IMPLEMENTATIONS)
    assert choice.backend != "ascend"
    (verdict,) = [each for each in choice.verdicts if each.backend == "ascend"]
    assert told in verdict.reason


@pytest.mark.parametrize(("operator", "dims", "options"), DEEPSEEK_V3)
def test_deepseek_v3_is_taken_at_its_own_sizes(operator, dims, options):
    """No limit sends one of its operators to plain torch, interleaved positions among them."""
    assert choose(npu_call(operator, dims, **options), IMPLEMENTATIONS).backend == "ascend"


def choice_with_weights(operator, dtype):
    """Choose for a call in bfloat16 whose last tensor has another dtype."""
    call = npu_call(operator)
    tensors = (*call.tensors[:-1], call.tensors[-1]._replace(dtype=dtype))
    return choose(call._replace(tensors=tensors), IMPLEMENTATIONS).backend


def test_weights_of_a_third_dtype_are_refused():
    """RMSNorm takes weights of x's dtype or float32; the sum with a residual x's alone."""
    for operator, other in (("rms_norm", torch.float16), ("add_rms_norm", torch.float32)):
        assert choice_with_weights(operator, other) != "ascend"


def test_a_router_may_weigh_in_float32():
    """Rows in bfloat16 are summed with weights in any dtype but float64, which CANN lacks."""
    assert choice_with_weights("unpermute_tokens", torch.float32) == "ascend"
    assert choice_with_weights("unpermute_tokens", torch.float64) != "ascend"


class Called(Exception):  # noqa: N818 - it is no error
    """An operator of torch_npu was called, with arguments that fit."""


class Namespace:
    """Stands for `torch.ops.npu`: checks a call against its schema and goes no further."""

    def __init__(self):
        lines = (GOLDEN / "schemas.txt").read_text().splitlines()
        parsed = [torch._C.parse_schema(line) for line in lines]
        self.schemas = {schema.name.removeprefix("npu::"): schema for schema in parsed}

    def __getattr__(self, name):
        return lambda *given, **named: fit(self.schemas[name], given, named)


def fit(schema, given, named):
    """Check arguments as the dispatcher would, by place, name, and kind."""
    slots = schema.arguments
    assert len(given) <= sum(not slot.kwarg_only for slot in slots)
    bound = dict(zip((slot.name for slot in slots), given, strict=False))
    assert not bound.keys() & named.keys()
    bound |= named
    assert bound.keys() <= {slot.name for slot in slots}
    for slot in slots:
        assert slot.name in bound or slot.has_default_value()
        if bound.get(slot.name) is not None:
            assert isinstance(bound[slot.name], kinds(str(slot.type))), slot.name
    raise Called(schema.name)


def kinds(name):
    """Return the Python types that a schema's type takes."""
    name = name.removeprefix("Optional[").rstrip("]")
    if name.startswith("List["):
        return list
    return {"Tensor": torch.Tensor, "int": int, "float": float, "str": str, "bool": bool}[name]


@pytest.mark.parametrize("implementation", ADAPTERS, ids=OPERATORS)
def test_the_calls_fit_torch_npus_schemas(implementation, monkeypatch):
    """The schemas are those of the wheel, as a golden file; every option is tried."""
    contract = CONTRACTS[implementation.operator]
    if implementation.operator in ("layer_norm", "adamw_step"):
        pytest.skip("it goes through torch's own operator")
    monkeypatch.setattr(torch.ops, "npu", Namespace())
    dtype = torch.bfloat16 if torch.bfloat16 in implementation.dtypes else torch.float32
    trials = [{}, *({each.name: value} for each in contract.options for value in each.trials)]
    for trial in trials:
        tensors = contract.draw({}, dtype=dtype).values()
        options = [trial.get(each.name, each.default) for each in contract.options]
        with pytest.raises(Called):
            implementation.run(*tensors, *options)


def test_halves_that_stand_side_by_side_are_joined_without_a_copy():
    """One projection cut in two is one tensor to the fused gate; anything else is copied."""
    whole = torch.randn(3, 5, 16)
    gate, up = whole.chunk(2, -1)
    joined = gates.concat_gate_up(gate, up)
    assert joined.data_ptr() == whole.data_ptr()
    assert torch.equal(joined, whole)
    rows = torch.randn(6, 40)[:, 4:36].unflatten(0, (2, 3)).chunk(2, -1)
    assert gates.concat_gate_up(*rows).data_ptr() == rows[0].data_ptr()
    others = [
        (up, gate),
        (gate, up.contiguous()),
        (gate, gate),
        (gate[..., ::2], up[..., ::2]),
    ]
    for one, two in others:
        assert torch.equal(gates.concat_gate_up(one, two), torch.cat((one, two), -1))


def test_widened_tables_are_made_once_and_again_when_they_change():
    """A table of angles is doubled for all layers of a step, and anew once it was written to."""
    table = torch.randn(1, 4, 3)
    wide = rotary._widen(table, False)
    assert torch.equal(wide, torch.cat((table, table), -1).unsqueeze(2))
    assert rotary._widen(table, False) is wide
    other = rotary._widen(table, True)
    assert torch.equal(other, table.repeat_interleave(2, -1).unsqueeze(2))
    table.mul_(2)
    assert torch.equal(rotary._widen(table, True), 2 * other)
