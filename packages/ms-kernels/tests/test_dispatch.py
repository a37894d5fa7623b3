"""Dispatch: a pure choice of implementation with reasons, which users can override."""

import itertools
import threading

import pytest
import torch
from attrs import evolve

import ms_kernels
from ms_kernels import ArgumentError, BackendError, explain, rms_norm, use_backend
from ms_kernels.contracts.call import Call, TensorMeta
from ms_kernels.core import dispatch
from ms_kernels.core.choice import Implementation, choose, first_fit
from ms_kernels.core.tables import chips
from ms_kernels.core.tracing import known_when_traced
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS, OPERATORS

# Large enough for the CPU implementation to pay off on any chip.
LARGE = (torch.randn(4096, 1024), torch.ones(1024))


def fake_implementation(backend, **settings):
    """Return an implementation of rms_norm that returns its backend's name."""
    return Implementation(
        operator="rms_norm", backend=backend, run=lambda *args: backend, merit="", **settings
    )


def describe_rms_norm(device="cpu", dtype=torch.float32, plain=True):
    """Describe a call of rms_norm."""
    meta = TensorMeta((4, 8), dtype, torch.device(device), (8, 1), plain)
    return Call("rms_norm", (meta, meta), (1e-6,))


def dims_for(contract, rows):
    """Return the contract's sizes for this number of rows."""
    dims = {next(iter(contract.example)): rows}
    if contract.name == "unpermute_tokens":
        dims = {"R": 2 * rows, "T": rows}
    return dims


def test_the_first_match_is_chosen_and_every_rejection_has_a_reason():
    """Order decides; device, dtype and subclass rule out candidates, each with its reason."""
    candidates = [
        fake_implementation("other"),
        fake_implementation("chip", devices=frozenset({"cuda"}), subclasses=True),
        fake_implementation("half", dtypes=(torch.bfloat16,), subclasses=True),
        fake_implementation("any", subclasses=True),
    ]
    assert choose(describe_rms_norm(), candidates).backend == "other"
    choice = choose(describe_rms_norm(plain=False), candidates)
    assert choice.backend == "any"
    assert [verdict.taken for verdict in choice.verdicts] == [False, False, False, True]
    assert "subclass" in choice.verdicts[0].reason
    assert "runs on cuda, not on cpu" in choice.verdicts[1].reason
    assert "supports bfloat16, not float32" in choice.verdicts[2].reason
    assert choose(describe_rms_norm("cuda", plain=False), candidates).backend == "chip"
    assert (
        choose(describe_rms_norm(dtype=torch.bfloat16, plain=False), candidates).backend == "half"
    )


def test_the_choice_is_a_pure_function():
    """The same call gives an equal choice, and `first_fit` picks the same as `choose`."""
    for operator, contract in CONTRACTS.items():
        for device, dtype in itertools.product(("cpu", "cuda"), (torch.float32, torch.bfloat16)):
            for rows in (1, 4096):
                described = contract.call(dims_for(contract, rows), dtype=dtype, device=device)
                choice = choose(described, IMPLEMENTATIONS)
                assert choice == choose(described, IMPLEMENTATIONS)
                assert first_fit(described, IMPLEMENTATIONS) is choice.implementation
                assert choice.operator == operator
                assert sum(verdict.taken for verdict in choice.verdicts) == 1


def test_every_operator_has_a_reference_that_takes_any_call():
    """Any device, dtype and subclass."""
    for contract in CONTRACTS.values():
        (reference,) = [
            impl
            for impl in IMPLEMENTATIONS
            if impl.operator == contract.name and impl.backend == "reference"
        ]
        assert (reference.devices, reference.dtypes, reference.subclasses) == (None, None, True)


def test_explain_names_the_backend_that_runs(monkeypatch):
    """Every operator runs the implementation that `explain` names."""
    backends_run = []
    for name, operator in OPERATORS.items():
        recording = tuple(
            Implementation(
                operator=impl.operator,
                backend=impl.backend,
                run=lambda *args, impl=impl: (backends_run.append(impl.backend), impl.run(*args))[
                    1
                ],
                devices=impl.devices,
                dtypes=impl.dtypes,
                subclasses=impl.subclasses,
                refuses=impl.refuses,
                merit=impl.merit,
            )
            for impl in operator.implementations
        )
        monkeypatch.setitem(OPERATORS, name, evolve(operator, implementations=recording))
    monkeypatch.setattr(dispatch, "_cache", {})
    for operator, contract in CONTRACTS.items():
        for rows, dtype in itertools.product((1, 128), (torch.float32, torch.bfloat16)):
            tensors = contract.draw(dims_for(contract, rows), dtype=dtype)
            options = {option.name: option.default for option in contract.options}
            for _ in range(2):
                getattr(ms_kernels, operator)(**tensors, **options)
                assert backends_run.pop() == explain(operator, **tensors).backend


def test_use_backend_forces_a_backend_within_its_block():
    """Nested blocks win, and the previous choice returns afterwards, also after an error."""
    assert explain("rms_norm", *LARGE).backend == "cpu"
    with use_backend("reference"):
        assert explain("rms_norm", *LARGE).backend == "reference"
        with use_backend("cpu"):
            assert explain("rms_norm", *LARGE).backend == "cpu"
        assert explain("rms_norm", *LARGE).backend == "reference"
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        raise ZeroDivisionError
    assert explain("rms_norm", *LARGE).backend == "cpu"


def test_use_backend_is_thread_local():
    """Another thread is not affected."""
    backends = []
    with use_backend("reference"):
        thread = threading.Thread(
            target=lambda: backends.append(explain("rms_norm", *LARGE).backend)
        )
        thread.start()
        thread.join()
    assert backends == ["cpu"]


def test_a_forced_backend_that_cannot_take_the_call_is_an_error():
    """Dispatch does not fall back silently; naming a second backend allows it."""
    q = torch.randn(2, 64, 4, 32, dtype=torch.bfloat16)
    angles = torch.zeros(1, 64, 16)
    with use_backend("cpu"):
        with pytest.raises(BackendError, match=r"cpu supports float32, float64, not bfloat16"):
            ms_kernels.rotary(q, q, angles, angles)
        # A named backend is used where it can run, even if it is slower.
        assert explain("rms_norm", torch.ones(2, 4), torch.ones(4)).backend == "cpu"
        feature_first = torch.randn(2, 4, 32, 64).permute(0, 3, 1, 2)
        with pytest.raises(BackendError, match=r"attention.*last stride of 1; q has 64"):
            ms_kernels.attention(feature_first, feature_first, feature_first)
    with use_backend("cpu", "reference"):
        assert explain("rotary", q, q, angles, angles).backend == "reference"


@pytest.mark.parametrize("names", [("cuda13",), ("cpu", "trition"), ()])
def test_an_unknown_backend_error_lists_the_backends(names):
    """`use_backend` without a name gives the same error."""
    with (
        pytest.raises(BackendError, match="ascend, cpu, sdpa, triton, reference"),
        use_backend(*names),
    ):
        pass


def test_explain_rejects_unknown_operators_and_arguments():
    """The error lists the valid names."""
    with pytest.raises(BackendError, match=r"'rmsnorm'; use one of add_rms_norm, .*rms_norm"):
        explain("rmsnorm", *LARGE)
    with pytest.raises(ArgumentError, match=r"epsilon.*eps"):
        explain("rms_norm", *LARGE, epsilon=1e-5)
    with pytest.raises(ArgumentError, match="weight is None"):
        explain("rms_norm", LARGE[0])


def test_the_decision_cache_is_bounded(monkeypatch):
    """A stream of new shapes evicts old decisions."""
    monkeypatch.setattr(dispatch, "MAX_CACHED", 16)
    monkeypatch.setattr(dispatch, "_cache", {})
    weight = torch.ones(8)
    for rows in range(100):
        rms_norm(torch.ones(rows, 8), weight)
        assert len(dispatch._cache) <= 16


def test_a_repeated_call_is_not_checked_again(monkeypatch):
    """The second call is a cache hit; a call that differs in any property is decided again."""
    monkeypatch.setattr(dispatch, "_cache", {})
    decided, decide = [], dispatch.decide

    def counting(described):
        decided.append(described)
        return decide(described)

    monkeypatch.setattr(dispatch, "decide", counting)
    x, weight = torch.randn(4, 8), torch.ones(8)
    for _ in range(3):
        rms_norm(x, weight)
    assert len(decided) == 1
    different = [
        lambda: rms_norm(torch.randn(5, 8), weight),
        lambda: rms_norm(x.double(), weight),
        lambda: rms_norm(torch.randn(8, 4).T, weight),
        lambda: rms_norm(x, weight, 1e-5),
        lambda: rms_norm(x, torch.nn.Parameter(weight)),
        lambda: torch.func.grad(lambda t: rms_norm(t, weight).sum())(x),
    ]
    for count, run in enumerate(different, 2):
        run()
        run()
        assert len(decided) == count


@pytest.mark.parametrize("operator", CONTRACTS)
def test_a_sparse_tensor_is_refused_even_after_a_dense_one_with_its_strides(operator):
    """A COO tensor reports strides of 0, like an expanded one; only its layout differs."""
    contract = CONTRACTS[operator]
    options = {option.name: option.default for option in contract.options}
    example = contract.draw({})
    first = contract.arguments[0].name
    dense = {**example, first: example[first].flatten()[0].expand(example[first].shape)}
    getattr(ms_kernels, operator)(**dense, **options)
    with pytest.raises(ArgumentError, match=f"{first} is laid out as torch.sparse_coo"):
        getattr(ms_kernels, operator)(**{**example, first: example[first].to_sparse()}, **options)


@pytest.mark.parametrize("operator", CONTRACTS)
def test_torch_compile_has_no_graph_break_in_any_operator(operator):
    """One graph, also under changing shapes, with the results and gradients of the plain call."""
    contract = CONTRACTS[operator]
    plain = getattr(ms_kernels, operator)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    options = {option.name: option.default for option in contract.options}
    # The graph unrolls one step per position (48 in the example); chunking starts at 8 positions.
    short = {"S": 10} if operator == "gated_delta_rule" else {}
    for rows in (3, 5, 7):
        tensors = contract.draw(dims_for(contract, rows) | short)
        outputs = []
        for run in (compiled, plain):
            inputs = {name: tensor.clone() for name, tensor in tensors.items()}
            leaves = [
                inputs[argument.name].requires_grad_()
                for argument in contract.arguments
                if argument.differentiable
            ]
            result = run(**inputs, **options)
            result = result if isinstance(result, tuple) else (result,)
            differentiable = [part for part in result if part.requires_grad]
            grad_outputs = [torch.ones_like(part) for part in differentiable]
            grads = torch.autograd.grad(differentiable, leaves, grad_outputs) if leaves else ()
            outputs.append([*result, *grads])
        for compiled_output, plain_output in zip(*outputs, strict=True):
            # The same operations, maybe on another backend: a few float32 roundings apart.
            torch.testing.assert_close(compiled_output, plain_output, rtol=1e-5, atol=1e-5)


def test_torch_compile_respects_use_backend_and_checks_arguments():
    """Calls are checked and dispatched while tracing."""
    compiled = torch.compile(rms_norm, backend="eager")
    with pytest.raises(Exception, match="weight is of shape"):
        compiled(torch.ones(2, 8), torch.ones(7))
    torch._dynamo.reset()
    with use_backend("cpu"), pytest.raises(Exception, match="none of"):
        torch.compile(rms_norm, fullgraph=True, backend="eager")(*LARGE)
    torch._dynamo.reset()


def test_known_when_traced_sets_the_same_mark_as_torch() -> None:
    """Marking without importing torch's compiler equals `torch.compiler.assume_constant_result`."""

    def our_function() -> int:
        return 1

    def their_function() -> int:
        return 1

    torch.compiler.assume_constant_result(their_function)
    assert vars(known_when_traced(our_function)) == vars(their_function)


@pytest.mark.parametrize("chip", [*chips(), "cpu-avx2", "cpu-default"])
def test_the_readme_example_uses_the_reference_on_every_chip(chip):
    """So the README's output holds on any machine."""
    example = CONTRACTS["rms_norm"].call({"...": 4, "H": 256}, chip=chip)
    assert choose(example, IMPLEMENTATIONS).backend == "reference"
