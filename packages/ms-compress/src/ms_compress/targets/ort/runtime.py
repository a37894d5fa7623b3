"""onnxruntime on the CPU as the runtime for ONNX files."""

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
"""accuracy_level of MatMulNBits at which inputs are rounded to 8 bits."""
CACHE_PARTS = ("key", "value")
"""Tensors in the cache of each layer."""


class OnnxRuntime:
    """A folder run by onnxruntime."""

    name = "onnxruntime"

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        onnxruntime = import_library(
            "onnxruntime", extra="ort", purpose="running ONNX needs onnxruntime"
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # fatal errors only: its errors are raised as exceptions
        # It reports its second attempt on stdout.
        with library_errors(folder, "onnxruntime"), redirect_stdout(StringIO()):
            self.session = onnxruntime.InferenceSession(
                folder / "model.onnx", options, providers=["CPUExecutionProvider"]
            )
        self.folder = folder
        shapes = {item.name: item.shape for item in self.session.get_inputs()}
        self.layers = sum(name.endswith(".key") for name in shapes)
        sizes = shapes.get("past_key_values.0.key", [])
        if len(sizes) != 4 or not all(isinstance(size, int) for size in (sizes[1], sizes[3])):
            raise ExportError(f"{folder}: its graph has no past_key_values; export it again")
        self.key_heads, self.width = sizes[1], sizes[3]

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; special tokens in it are recognized, and none is added."""
        return encoder(self.folder)(text)

    def ends(self) -> frozenset[int]:
        """Return the end tokens in generation_config.json, as onnxruntime itself has none."""
        path = self.folder / "generation_config.json"
        config = read_json(path, dict[str, Any], error=ExportError) if path.is_file() else {}
        eos = config.get("eos_token_id")
        with library_errors(path, "onnxruntime", "take its ends"):
            return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def generate(self, tokens: list[int], max_tokens: int) -> list[int]:
        """Return greedily decoded tokens up to an end token, at most `max_tokens`."""
        ends, generated = self.ends(), list[int]()
        logits, *past = self._run(np.array([tokens], dtype=np.int64), self._empty(1))
        while len(generated) < max_tokens:
            generated.append(int(logits[0, -1].argmax()))
            if generated[-1] in ends or len(generated) == max_tokens:
                break
            logits, *past = self._run(np.array([generated[-1:]], dtype=np.int64), past)
        return generated

    def _run(self, tokens: Any, past: list[Any]) -> list[Any]:
        """Return logits, and the keys and values of all positions so far."""
        total = past[0].shape[2] + tokens.shape[1]
        names = [
            f"past_key_values.{layer}.{part}"
            for layer in range(self.layers)
            for part in ("key", "value")
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
        """Return logits (B, S, V) float32 for tokens (B, S) int64."""
        out = self._run(tokens.numpy(), self._empty(len(tokens)))
        return torch.from_numpy(out[0])

    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Call `visit` for each MatMulNBits, using a graph that also outputs their values."""
        onnxruntime = import_library(
            "onnxruntime", extra="ort", purpose="running ONNX needs onnxruntime"
        )
        onnx = import_library("onnx", extra="ort", purpose="ONNX files need the onnx library")
        with library_errors(self.folder, "onnxruntime"):
            model = onnx.load(self.folder / "model.onnx", load_external_data=False)
            products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
            existing = {output.name for output in model.graph.output}
            # Each name once and in order, as layers such as q, k and v share an input.
            exposed = dict.fromkeys(
                name for node in products for name in (node.input[0], node.output[0])
            )
            dtype = onnx.TensorProto.FLOAT
            model.graph.output.extend(
                onnx.helper.make_tensor_value_info(name, dtype, None)
                for name in exposed
                if name not in existing
            )
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            # A model in memory has no folder, so the folder of its data must be named.
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(self.folder.absolute())
            )
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            names = [
                f"past_key_values.{layer}.{part}"
                for layer in range(self.layers)
                for part in CACHE_PARTS
            ]
            feed = dict(zip(names, self._empty(len(tokens)), strict=True))
            feed["input_ids"] = tokens.numpy()
            feed["attention_mask"] = np.ones(tuple(tokens.shape), dtype=np.int64)
            values = dict(zip(exposed, session.run(list(exposed), feed), strict=True))
        for node in products:
            x, out = (torch.from_numpy(values[name]) for name in (node.input[0], node.output[0]))
            attributes = {item.name: item.i for item in node.attribute}
            rounds = attributes.get("accuracy_level", 0) == ROUNDS_INPUTS
            run = LayerRun(
                # `Graph` names the codes after the layer.
                name=node.input[1].removesuffix(".codes").removesuffix(".rows"),
                x=x,
                out=out,
                has_bias=not node.output[0].endswith(".product"),
                input_group=attributes.get("block_size") if rounds else None,
            )
            visit(run)

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Return the seconds for a prefill of `tokens`, and for `steps` greedy tokens after it."""
        start_s = perf_counter()
        logits, *past = self._run(np.array([tokens], dtype=np.int64), self._empty(1))
        prefilled_s = perf_counter()
        for _ in range(steps):
            token = logits[:, -1:].argmax(-1).astype(np.int64)
            logits, *past = self._run(token, past)
        return prefilled_s - start_s, perf_counter() - prefilled_s
