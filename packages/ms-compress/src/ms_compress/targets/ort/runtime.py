"""onnxruntime on the CPU as the runtime of ONNX files."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import read_json
from ms_compress.targets.libraries import import_library, library_errors
from ms_compress.targets.target import LayerRun, LayerVisit
from ms_compress.targets.tokenizer_json import encoder

ROUNDS_INPUTS = 4
"""The accuracy_level of MatMulNBits at which inputs are rounded to 8 bits."""
KEPT = ("key", "value")
"""What the cache holds of a layer."""


class OnnxRuntime:
    """A folder as onnxruntime computes it."""

    name = "onnxruntime"

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        onnxruntime = import_library(
            "onnxruntime", extra="ort", purpose="running ONNX needs onnxruntime"
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # what is fatal alone: its errors are raised too
        # Standard output is where it tells of its second try.
        with library_errors(folder, "onnxruntime"), redirect_stdout(StringIO()):
            self.session = onnxruntime.InferenceSession(
                folder / "model.onnx", options, providers=["CPUExecutionProvider"]
            )
        self.folder = folder
        shapes = {each.name: each.shape for each in self.session.get_inputs()}
        self.layers = sum(name.endswith(".key") for name in shapes)
        sizes = shapes.get("past_key_values.0.key", [])
        if len(sizes) != 4 or not all(isinstance(each, int) for each in (sizes[1], sizes[3])):
            raise ExportError(f"{folder}: its graph has no past_key_values; export it again")
        self.key_heads, self.width = sizes[1], sizes[3]

    def encode(self, text: str) -> list[int]:
        """Return tokens of a text; special tokens in it are recognised, and none is added."""
        return encoder(self.folder)(text)

    def ends(self) -> frozenset[int]:
        """Return the ends that generation_config.json names: onnxruntime knows nothing of texts."""
        path = self.folder / "generation_config.json"
        found = read_json(path, dict[str, Any], error=ExportError) if path.is_file() else {}
        said = found.get("eos_token_id")
        with library_errors(path, "onnxruntime", "take its ends"):
            return frozenset(said if isinstance(said, list) else [] if said is None else [said])

    def generate(self, tokens: list[int], most: int) -> list[int]:
        """Return the likeliest next tokens until one ends the text, `most` of them at most."""
        ends, made = self.ends(), list[int]()
        logits, *past = self._run(np.array([tokens], dtype=np.int64), self._empty(1))
        while len(made) < most:
            made.append(int(logits[0, -1].argmax()))
            if made[-1] in ends or len(made) == most:
                break
            logits, *past = self._run(np.array([made[-1:]], dtype=np.int64), past)
        return made

    def _run(self, tokens: Any, past: list[Any]) -> list[Any]:
        """Return logits, and the keys and values of all positions so far."""
        total = past[0].shape[2] + tokens.shape[1]
        names = [
            f"past_key_values.{layer}.{each}"
            for layer in range(self.layers)
            for each in ("key", "value")
        ]
        feed = dict(zip(names, past, strict=True))
        feed["input_ids"] = tokens
        feed["attention_mask"] = np.ones((len(tokens), total), dtype=np.int64)
        with library_errors(self.folder, "onnxruntime", "run it"):
            outs: list[Any] = self.session.run(None, feed)
        return outs

    def _empty(self, rows: int) -> list[Any]:
        shape = (rows, self.key_heads, 0, self.width)
        return [np.zeros(shape, dtype=np.float32) for _ in range(2 * self.layers)]

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 of tokens (B, S) int64."""
        out = self._run(tokens.numpy(), self._empty(len(tokens)))
        return torch.from_numpy(out[0])

    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Call `visit` for each MatMulNBits, in a session whose graph also returns its values."""
        onnxruntime = import_library(
            "onnxruntime", extra="ort", purpose="running ONNX needs onnxruntime"
        )
        onnx = import_library("onnx", extra="ort", purpose="ONNX files need the onnx library")
        with library_errors(self.folder, "onnxruntime"):
            model = onnx.load(self.folder / "model.onnx", load_external_data=False)
            products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
            there = {each.name for each in model.graph.output}
            shown = dict.fromkeys(n for node in products for n in (node.input[0], node.output[0]))
            kind = onnx.TensorProto.FLOAT
            model.graph.output.extend(
                onnx.helper.make_tensor_value_info(name, kind, None)
                for name in shown
                if name not in there
            )
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(self.folder.absolute())
            )
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            names = [f"past_key_values.{n}.{k}" for n in range(self.layers) for k in KEPT]
            feed = dict(zip(names, self._empty(len(tokens)), strict=True))
            feed["input_ids"] = tokens.numpy()
            feed["attention_mask"] = np.ones(tuple(tokens.shape), dtype=np.int64)
            values = dict(zip(shown, session.run(list(shown), feed), strict=True))
        for node in products:
            x, out = (torch.from_numpy(values[name]) for name in (node.input[0], node.output[0]))
            said = {each.name: each.i for each in node.attribute}
            rounds = said.get("accuracy_level", 0) == ROUNDS_INPUTS
            run = LayerRun(
                name=node.input[1].removesuffix(".codes").removesuffix(".rows"),
                x=x,
                out=out,
                has_bias=not node.output[0].endswith(".product"),
                input_group=said.get("block_size") if rounds else None,
            )
            visit(run)

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Measure the seconds of a prefill of `tokens`, and of `steps` greedy tokens after it."""
        began = perf_counter()
        logits, *past = self._run(np.array([tokens], dtype=np.int64), self._empty(1))
        prefilled = perf_counter()
        for _ in range(steps):
            token = logits[:, -1:].argmax(-1).astype(np.int64)
            logits, *past = self._run(token, past)
        return prefilled - began, perf_counter() - prefilled
