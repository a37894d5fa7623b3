"""Which implementation a call gets: a pure choice with reasons, which users may force."""

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

# On any chip enough for the CPU's own implementation to pay.
LARGE = (torch.randn(4096, 1024), torch.ones(1024))


def stand_in(backend, **settings):
    """Return an implementation of rms_norm that answers with its backend's name."""
    return Implementation(
        operator="rms_norm", backend=backend, run=lambda *given: backend, merit="", **settings
    )


def call(device="cpu", dtype=torch.float32, plain=True):
    """Describe a call of rms_norm."""
    meta = TensorMeta((4, 8), dtype, torch.device(device), (8, 1), plain)
    return Call("rms_norm", (meta, meta), (1e-6,))


def sized(contract, rows):
    """Return the contract's sizes with so many rows."""
    dims = {next(iter(contract.example)): rows}
    if contract.name == "unpermute_tokens":
        dims = {"R": 2 * rows, "T": rows}
    return dims


def test_the_first_that_fits_is_taken_and_every_reason_is_told():
    """Order decides; device, dtype and subclass rule out, each with its reason."""
    offered = [
        stand_in("other"),
        stand_in("chip", devices=frozenset({"cuda"}), subclasses=True),
        stand_in("half", dtypes=(torch.bfloat16,), subclasses=True),
        stand_in("any", subclasses=True),
    ]
    assert choose(call(), offered).backend == "other"
    choice = choose(call(plain=False), offered)
    assert choice.backend == "any"
    assert [each.taken for each in choice.verdicts] == [False, False, False, True]
    assert "subclass" in choice.verdicts[0].reason
    assert "runs on cuda, not on cpu" in choice.verdicts[1].reason
    assert "supports bfloat16, not float32" in choice.verdicts[2].reason
    assert choose(call("cuda", plain=False), offered).backend == "chip"
    assert choose(call(dtype=torch.bfloat16, plain=False), offered).backend == "half"


def test_the_choice_is_a_pure_function():
    """The same call gives an equal choice, and `first_fit` takes what `choose` takes."""
    for operator, contract in CONTRACTS.items():
        for device, dtype in itertools.product(("cpu", "cuda"), (torch.float32, torch.bfloat16)):
            for rows in (1, 4096):
                asked = contract.call(sized(contract, rows), dtype=dtype, device=device)
                choice = choose(asked, IMPLEMENTATIONS)
                assert choice == choose(asked, IMPLEMENTATIONS)
                assert first_fit(asked, IMPLEMENTATIONS) is choice.implementation
                assert choice.operator == operator
                assert sum(each.taken for each in choice.verdicts) == 1


def test_every_operator_has_a_reference_that_refuses_nothing():
    """Any device, any dtype, any subclass: the reference takes the call."""
    for contract in CONTRACTS.values():
        (reference,) = [
            each
            for each in IMPLEMENTATIONS
            if each.operator == contract.name and each.backend == "reference"
        ]
        assert (reference.devices, reference.dtypes, reference.subclasses) == (None, None, True)


def test_what_runs_is_what_explain_says(monkeypatch):
    """Each operator runs the very function that `explain` names."""
    ran = []
    for name, operator in OPERATORS.items():
        watched = tuple(
            Implementation(
                operator=each.operator,
                backend=each.backend,
                run=lambda *given, each=each: (ran.append(each.backend), each.run(*given))[1],
                devices=each.devices,
                dtypes=each.dtypes,
                subclasses=each.subclasses,
                refuses=each.refuses,
                merit=each.merit,
            )
            for each in operator.implementations
        )
        monkeypatch.setitem(OPERATORS, name, evolve(operator, implementations=watched))
    monkeypatch.setattr(dispatch, "_cache", {})
    for operator, contract in CONTRACTS.items():
        for rows, dtype in itertools.product((1, 128), (torch.float32, torch.bfloat16)):
            tensors = contract.draw(sized(contract, rows), dtype=dtype)
            options = {option.name: option.default for option in contract.options}
            for _ in range(2):
                getattr(ms_kernels, operator)(**tensors, **options)
                assert ran.pop() == explain(operator, **tensors).backend


def test_use_backend_forces_one_and_ends_with_its_block():
    """Inside, the named backend is taken; nested blocks win; outside, all is as before."""
    assert explain("rms_norm", *LARGE).backend == "cpu"
    with use_backend("reference"):
        assert explain("rms_norm", *LARGE).backend == "reference"
        with use_backend("cpu"):
            assert explain("rms_norm", *LARGE).backend == "cpu"
        assert explain("rms_norm", *LARGE).backend == "reference"
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        raise ZeroDivisionError
    assert explain("rms_norm", *LARGE).backend == "cpu"


def test_use_backend_holds_for_its_own_thread():
    """Another thread is not forced."""
    seen = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(explain("rms_norm", *LARGE).backend))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_a_forced_backend_that_cannot_take_the_call_is_an_error():
    """Nothing falls back in silence; naming a second backend allows it."""
    q = torch.randn(2, 64, 4, 32, dtype=torch.bfloat16)
    angles = torch.zeros(1, 64, 16)
    with use_backend("cpu"):
        with pytest.raises(BackendError, match=r"cpu supports float32, float64, not bfloat16"):
            ms_kernels.rotary(q, q, angles, angles)
        # What is named is taken where it can, whether or not it pays.
        assert explain("rms_norm", torch.ones(2, 4), torch.ones(4)).backend == "cpu"
        feature_first = torch.randn(2, 4, 32, 64).permute(0, 3, 1, 2)
        with pytest.raises(BackendError, match=r"attention.*last stride of 1; q has 64"):
            ms_kernels.attention(feature_first, feature_first, feature_first)
    with use_backend("cpu", "reference"):
        assert explain("rotary", q, q, angles, angles).backend == "reference"


@pytest.mark.parametrize("names", [("cuda13",), ("cpu", "trition"), ()])
def test_an_absent_backend_is_told_with_those_that_exist(names):
    """The error names the backend that is absent and lists what there is."""
    with (
        pytest.raises(BackendError, match="ascend, cpu, sdpa, triton, reference"),
        use_backend(*names),
    ):
        pass


def test_explain_refuses_what_does_not_exist():
    """Unknown operators and arguments are named, beside those that exist."""
    with pytest.raises(BackendError, match=r"'rmsnorm'; use one of adamw_step, .*rms_norm"):
        explain("rmsnorm", *LARGE)
    with pytest.raises(ArgumentError, match=r"epsilon.*eps"):
        explain("rms_norm", *LARGE, epsilon=1e-5)
    with pytest.raises(ArgumentError, match="weight is None"):
        explain("rms_norm", LARGE[0])


def test_kept_decisions_cannot_fill_the_memory(monkeypatch):
    """Ever new shapes are forgotten in time."""
    monkeypatch.setattr(dispatch, "MAX_CACHED", 16)
    monkeypatch.setattr(dispatch, "_cache", {})
    weight = torch.ones(8)
    for rows in range(100):
        rms_norm(torch.ones(rows, 8), weight)
        assert len(dispatch._cache) <= 16


def test_a_call_like_one_before_is_not_checked_again(monkeypatch):
    """The second call is looked up; a call that differs in any property that is read is decided."""
    monkeypatch.setattr(dispatch, "_cache", {})
    decided, decide = [], dispatch.decide

    def counted(call):
        decided.append(call)
        return decide(call)

    monkeypatch.setattr(dispatch, "decide", counted)
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
        lambda: torch.func.grad(lambda one: rms_norm(one, weight).sum())(x),
    ]
    for count, run in enumerate(different, 2):
        run()
        run()
        assert len(decided) == count


@pytest.mark.parametrize("operator", CONTRACTS)
def test_a_sparse_tensor_is_refused_after_a_dense_one_of_its_strides_too(operator):
    """A COO tensor reports strides of 0, as an expanded one; its layout tells them apart."""
    contract = CONTRACTS[operator]
    options = {option.name: option.default for option in contract.options}
    drawn = contract.draw({})
    first = contract.arguments[0].name
    if not contract.mutates:  # what is written must not be expanded
        dense = {**drawn, first: drawn[first].flatten()[0].expand(drawn[first].shape)}
        getattr(ms_kernels, operator)(**dense, **options)
    with pytest.raises(ArgumentError, match=f"{first} is laid out as torch.sparse_coo"):
        getattr(ms_kernels, operator)(**{**drawn, first: drawn[first].to_sparse()}, **options)


def test_a_bool_in_a_tuple_is_refused_after_the_number_it_equals_too():
    """0.0 and False are equal and hash alike, and only one of them is a number."""
    tensors = [torch.ones(8) for _ in range(4)]
    settings = {"step": 1, "learning_rate": 0.1}
    ms_kernels.adamw_step(*tensors, betas=(0.0, 0.999), **settings)
    with pytest.raises(ArgumentError, match="betas"):
        ms_kernels.adamw_step(*tensors, betas=(False, 0.999), **settings)


@pytest.mark.parametrize("operator", CONTRACTS)
def test_torch_compile_follows_every_operator_without_a_graph_break(operator):
    """One graph, also when shapes change, with the results and gradients of the plain call."""
    contract = CONTRACTS[operator]
    plain = getattr(ms_kernels, operator)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    options = {option.name: option.default for option in contract.options}
    # Its graph has a step for each position, of which the example has 48; chunks begin at 8.
    few = {"S": 10} if operator == "gated_delta_rule" else {}
    for rows in (3, 5, 7):
        tensors = contract.draw(sized(contract, rows) | few)
        answers = []
        for run in (compiled, plain):
            given = {name: tensor.clone() for name, tensor in tensors.items()}
            leaves = [
                given[argument.name].requires_grad_()
                for argument in contract.arguments
                if argument.differentiable
            ]
            result = run(**given, **options)
            if contract.mutates:
                result = tuple(given.values())
            result = result if isinstance(result, tuple) else (result,)
            pulled = [each for each in result if each.requires_grad]
            pulls = [torch.ones_like(each) for each in pulled]
            slopes = torch.autograd.grad(pulled, leaves, pulls) if leaves else ()
            answers.append([*result, *slopes])
        for got, truth in zip(*answers, strict=True):
            # The same operations, perhaps of another backend: a few roundings of float32.
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


def test_torch_compile_minds_use_backend_and_bad_arguments():
    """While tracing, calls are checked and chosen as ever."""
    compiled = torch.compile(rms_norm, backend="eager")
    with pytest.raises(Exception, match="weight is of shape"):
        compiled(torch.ones(2, 8), torch.ones(7))
    torch._dynamo.reset()
    with use_backend("cpu"), pytest.raises(Exception, match="none of"):
        torch.compile(rms_norm, fullgraph=True, backend="eager")(*LARGE)
    torch._dynamo.reset()


def test_what_is_known_when_traced_has_the_mark_that_torch_sets() -> None:
    """The mark that is set without torch's compiler is the one that its own decorator sets."""

    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(known_when_traced(ours)) == vars(theirs)


@pytest.mark.parametrize("chip", [*chips(), "cpu-avx2", "cpu-default"])
def test_the_call_that_the_readme_explains_gets_the_reference_on_every_chip(chip):
    """Its line says so, whatever the machine that prints it."""
    call = CONTRACTS["rms_norm"].call({"...": 4, "H": 256}, chip=chip)
    assert choose(call, IMPLEMENTATIONS).backend == "reference"
