"""Perplexity, sizes and speeds of runtimes, and the report."""

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from folders import VOCABULARY, model, write_model, write_shards
from torch import Tensor
from torch.nn import functional as F

from ms_compress import ConfigError, DataError, ExportError, export, qat
from ms_compress.cli import main
from ms_compress.corpus import rows
from ms_compress.evaluation.measure import evaluate
from ms_compress.evaluation.options import Evaluation
from ms_compress.evaluation.perplexity import perplexity
from ms_compress.figures import figure, ratio
from ms_compress.files.durable import write_files
from ms_compress.report import Report, Result, render, table
from ms_compress.report.chart import _tick_labels, _ticks
from ms_compress.targets.footprint import footprint
from ms_compress.targets.target import open_runtime


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, its exports for two runtimes, and token shards."""
    folder = tmp_path_factory.mktemp("work")
    write_model(folder / "base")
    write_shards(folder)
    export(qat(model(), "ct.int4_g32"), folder / "ct")
    export(qat(model(), "ort.matmulnbits"), folder / "ort")
    return folder


def test_perplexity_is_exp_of_the_mean_token_loss(work: Path) -> None:
    """Against one cross entropy over all logits; ignored targets do not count."""
    held_out = rows(work / "shards", split="held_out", sequence_length=32, count=7)
    held_out["targets"][:, ::3] = -100
    runtime = open_runtime(work / "base", "float")
    logits, targets = runtime.logits(held_out["tokens"]), held_out["targets"]
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).exp()
    assert math.isclose(perplexity(runtime, held_out), float(expected), rel_tol=1e-5)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary_size() -> None:
    """With equal logits the perplexity is the number of tokens."""

    class Uniform:
        name = "uniform"

        def logits(self, tokens: Tensor) -> Tensor:
            return torch.zeros(*tokens.shape, 50)

        def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
            return 1.0, 1.0

    text = {name: torch.randint(0, 50, (3, 9)) for name in ("tokens", "targets")}
    assert math.isclose(perplexity(Uniform(), text), 50.0, rel_tol=1e-5)
    text["tokens"][0, 0] = 50
    with pytest.raises(DataError, match="tokens must be 0 to 49 for uniform, got 50"):
        perplexity(Uniform(), text)


def test_the_baseline_decodes_the_tokens_of_full_forward_passes(work: Path) -> None:
    """Decoding token by token with a cache gives the tokens of full forward passes."""
    runtime = open_runtime(work / "base", "float")
    text = [1, 2, 3, 4, 5]
    decoded: list[int] = []
    original = runtime._next  # type: ignore[attr-defined]

    def recording(tokens: Tensor, cache: object) -> Tensor:
        out: Tensor = original(tokens, cache)
        decoded.append(int(out))
        return out

    runtime._next = recording  # type: ignore[attr-defined]
    runtime.decode(text, 4)
    sequence = list(text)
    for token in decoded:
        assert token == int(runtime.logits(torch.tensor([sequence]))[0, -1].argmax())
        sequence.append(token)
    assert len(decoded) == 5


def test_weights_are_counted_in_every_format(work: Path, tmp_path: Path) -> None:
    """Every target's files have the model's number of weights; bytes are those on disk."""
    weights = sum(parameter.numel() for parameter in model().parameters())
    gguf = export(qat(model(), "gguf.q4_0"), tmp_path / "gguf")
    expected = {
        work / "base": ("float", "float32"),
        work / "ct": ("ct", "4-bit g32"),
        work / "ort": ("ort", "4-bit g32"),
        gguf: ("gguf", "Q4_0"),
    }
    for folder, target_and_scheme in expected.items():
        measured = footprint(folder)
        assert measured.weights == weights
        assert (measured.target, measured.scheme) == target_and_scheme
        assert 0 < measured.size_bytes <= sum(path.stat().st_size for path in folder.iterdir())
    # Four bits and one float32 scale per 32 weights make 5 bits; the embedding stays in float32.
    inside = weights - VOCABULARY * 64 - 5 * 64
    bits = 5 * inside + 32 * (weights - inside)
    assert 8 * footprint(work / "ct").size_bytes == pytest.approx(bits, rel=0.06)


@pytest.mark.parametrize("name", ["model.gguf", "model.onnx", "model.safetensors"])
def test_a_damaged_folder_is_named(name: str, work: Path, tmp_path: Path) -> None:
    """Bytes of another format give one line with the path."""
    (tmp_path / "config.json").write_text((work / "base" / "config.json").read_text())
    (tmp_path / name).write_bytes(b"\x00" * 64)
    with pytest.raises(ExportError, match=re.escape(str(tmp_path))):
        footprint(tmp_path)


def test_evaluate_writes_a_table_a_page_and_json(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command: every folder in its own runtime, the baseline first."""
    run = tmp_path / "run.toml"
    run.write_text(
        f'baseline = "{work}/base"\ndataset = "{work}/shards"\noutput_dir = "{tmp_path}/report"\n'
        "sequence_length = 32\nsequences = 4\n"
        "prefill_tokens = 16\ndecode_tokens = 4\nrounds = 3\n"
        f'[models]\n"RTN int4" = ["{work}/ct", "{work}/ort"]\n'
    )
    assert main(["evaluate", str(run)]) == 0
    report_json = (tmp_path / "report" / "report.json").read_bytes()
    report = msgspec.json.decode(report_json, type=Report)
    assert [result.runtime for result in report.results] == ["torch", "transformers", "onnxruntime"]
    held_out = rows(work / "shards", split="held_out", sequence_length=32, count=4)
    assert report.held_out_tokens == int((held_out["targets"] >= 0).sum()) > 100
    baseline = report.baseline
    assert baseline.prefill_ratio == baseline.decode_ratio == 1.0
    for result in report.results:
        assert result.prefill_ratio == result.prefill_tokens_per_s / baseline.prefill_tokens_per_s
        assert result.decode_ratio == result.decode_tokens_per_s / baseline.decode_tokens_per_s
    assert all(abs(result.perplexity / baseline.perplexity - 1) < 0.05 for result in report.results)
    assert table(report) == (tmp_path / "report" / "report.txt").read_text()
    captured = capsys.readouterr()
    assert "RTN int4" in captured.out
    assert "row 12/12  RTN int4 in onnxruntime" in captured.err
    assert not list(tmp_path.glob("report/*.partial"))


@pytest.mark.parametrize("trap", ["a file", "a folder named like the page"])
def test_an_unwritable_output_is_refused_before_measuring(
    trap: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked before the (missing) model is loaded; existing files stay."""
    out = tmp_path / "report"
    if trap == "a file":
        out.write_text("mine")
    else:
        (out / "report.html").mkdir(parents=True)
    paths = sorted(tmp_path.rglob("*"))
    run = write_run(tmp_path / "run.toml", baseline=f"{tmp_path}/nothing", dataset=f"{work}/shards")
    assert main(["evaluate", str(run), "--set", f"output_dir={out}"]) == 2
    assert str(out) in capsys.readouterr().err
    run.unlink()
    assert sorted(tmp_path.rglob("*")) == paths


def test_report_files_are_written_atomically(tmp_path: Path) -> None:
    """If the last file cannot be written, the others keep their old content."""
    (tmp_path / "a").write_text("old")
    contents = {tmp_path / "a": b"new", tmp_path / ("b" * 250): b"new"}
    with pytest.raises(ExportError, match="File name too long"):
        write_files(contents)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_bad_input_is_one_line(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the problem, and the nearest valid key."""
    run = tmp_path / "run.toml"
    valid = {"baseline": f"{work}/base", "dataset": f"{work}/shards", "output_dir": f"{tmp_path}/r"}

    def lines(**changes: object) -> str:
        settings = {**valid, "models": {"x": f"{work}/ct"}, **changes}
        run.write_text("".join(f"{k} = {_toml(v)}\n" for k, v in settings.items()))
        assert main(["evaluate", str(run)]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "did you mean 'rounds'" in lines(round=3)
    assert "has no model" in lines(models={"x": f"{tmp_path}/nothing"})
    assert "must be a plain model, got the ct model" in lines(baseline=f"{work}/ct")
    assert "has no shards" in lines(dataset=str(tmp_path))
    assert "must be a folder or a list of folders" in lines(models={"x": 3})
    assert "unknown key 'out'; did you mean 'output_dir'?" in lines(out="r")
    assert "unknown key 'data'; did you mean 'dataset'?" in lines(data="shards")
    assert not (tmp_path / "r").exists()


def test_the_report_warns_about_slower_results() -> None:
    """In the table's last lines, the page's notes, and the cells."""
    report = make_report([(1.0, 1.0), (0.5, 2.0), (1.5, 1.2)])
    assert report.warnings() == [
        "QAT <1> in r1 is slower than float in r0: prefill 0.50x its speed"
    ]
    assert table(report).rstrip().endswith("prefill 0.50x its speed")
    page = render(report)
    assert page.count('class="warning"') == 1
    assert page.count(' slow"') == 1
    assert "nothing is slower" in table(make_report([(1.0, 1.0), (1.1, 2.0)]))


def test_row_names_are_unique() -> None:
    """Results of one model in one runtime get names with format, then folder, then number."""
    same = {"model": "QAT int4", "runtime": "onnxruntime"}
    schemes_and_folders = [
        ("4-bit g32", "deep/a"),
        ("4-bit g64", "deep/b"),
        ("4-bit g32", "deep/c"),
    ]
    report = make_report([(1.0, 1.0)] + [(0.5, 0.5)] * 3)
    baseline, *results = report.results
    renamed = [
        msgspec.structs.replace(result, **same, scheme=scheme, folder=folder)
        for result, (scheme, folder) in zip(results, schemes_and_folders, strict=True)
    ]
    report = msgspec.structs.replace(report, results=(baseline, *renamed))
    assert report.names() == [
        "float · r0",
        "QAT int4 · onnxruntime · 4-bit g32 · deep/a",
        "QAT int4 · onnxruntime · 4-bit g64",
        "QAT int4 · onnxruntime · 4-bit g32 · deep/c",
    ]
    assert len(set(report.warnings())) == 3
    for drawing in re.findall(r"<svg.*?</svg>", render(report), flags=re.DOTALL)[1:]:
        texts = ElementTree.fromstring(drawing).findall("text")
        labels = [text.text.lstrip(" 0123456789") for text in texts if text.get("class") == "label"]
        assert len(set(labels)) == len(labels) == 4
    twins = msgspec.structs.replace(report, results=(baseline, renamed[0], renamed[0]))
    assert len(set(twins.names())) == 3


def test_the_page_needs_no_network_and_its_charts_are_valid() -> None:
    """No URL, no script, escaped names, and every chart is well-formed XML with bars inside it."""
    report = make_report([(1.0, 1.0), (0.5, 2.0), (1.5, 1.2)])
    page = render(report)
    assert not re.search(r"https?:|<script|@import|url\(", page)
    assert "QAT <1>" not in page
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        root = ElementTree.fromstring(chart)
        for mark in root.iter("rect"):
            assert 0 < float(mark.attrib["width"]) <= 720 - 250 - 96
    assert len(ElementTree.fromstring(charts[0]).findall("circle")) == 3


@pytest.mark.parametrize(
    "values",
    [
        [1.0014801, 1.0014803, 1.0014809],
        [1.0, 1.0 + 2**-52],
        [3.0, 3.0],
        [0.0, 100.0],
        [1e-7, 3e-7],
        [2e9, 2.0001e9],
        [12.5, 1e300],
        [0.0, 0.0],
    ],
)
def test_tick_labels_are_distinct_and_accurate(
    values: list[float],
) -> None:
    """For close values and for ranges of zero width."""
    ticks = _ticks(values)
    labels = _tick_labels(ticks)
    assert len(set(labels)) == len(labels) >= 2
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)
    step = ticks[1] - ticks[0]
    for tick, label in zip(ticks, labels, strict=True):
        assert abs(float(label.replace(",", "")) - tick) < step / 2


def test_small_differences_stay_visible_in_numbers() -> None:
    """Perplexities of 1.00148 and 1.00152 differ, and small losses and sizes are not 0."""
    assert figure(1.00148, 6) != figure(1.00152, 6)
    assert figure(3e-6) == "3.000e-06"
    assert figure(0.000_123_4) == "0.0001234"
    assert figure(17146.2) == "17,146"
    assert (ratio(0.5), ratio(4.368), ratio(0.0004)) == ("0.50", "4.37", "0.00040")


def test_contradictory_reports_are_refused() -> None:
    """A report without results, or with a NaN."""
    report = make_report([(1.0, 1.0)])
    document = json.loads(msgspec.json.encode(report))
    document["results"] = []
    with pytest.raises(msgspec.ValidationError, match="at least the baseline"):
        msgspec.json.decode(json.dumps(document).encode(), type=Report)
    with pytest.raises(ValueError, match="perplexity is NaN"):
        msgspec.structs.replace(report.baseline, perplexity=math.nan)


def test_an_evaluation_needs_folders_by_name() -> None:
    """A list of folders gives the report no names."""
    with pytest.raises(ConfigError, match="must be a table of folders by name"):
        Evaluation(baseline="a", models=["b"], dataset="c")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no shards"):
        evaluate(Evaluation(baseline="a", models={}, dataset="c"))


def write_run(path: Path, **settings: object) -> Path:
    """Write a run file without models to compare."""
    lines = {**settings, "models": {}}
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in lines.items()))
    return path


def make_report(ratios: list[tuple[float, float]]) -> Report:
    """Return a report with one result per pair of ratios."""
    results = tuple(
        Result(
            model=f"QAT <{i}>" if i else "float",
            runtime=f"r{i}",
            scheme="4-bit g32",
            perplexity=10.0 + i,
            size_bytes=10**6 * (9 - i),
            bits_a_weight=32 - i,
            prefill_tokens_per_s=1000 * prefill,
            decode_tokens_per_s=100 * decode,
            prefill_ratio=prefill,
            decode_ratio=decode,
        )
        for i, (prefill, decode) in enumerate(ratios)
    )
    return Report(
        title="A & B",
        held_out_tokens=1,
        sequence_length=1,
        prefill_tokens=1,
        decode_tokens=1,
        rounds=1,
        threads=1,
        results=results,
    )


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}" = {_toml(v)}' for k, v in value.items()) + "}"
    return json.dumps(value)
