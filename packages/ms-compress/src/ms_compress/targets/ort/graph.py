"""Build the decoder's graph for onnxruntime, node by node.

Inputs as passed by onnxruntime-genai: `input_ids` (B, S), `attention_mask`
(B, P + S), 0 for padding on either side, and `past_key_values.N.key` and `.value`
(B, heads, P, D); outputs are `logits` and `present.N.key` and `.value`. Source: onnxruntime's
ContribOperators.md.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ms_compress.models.decoder_config import DecoderConfig
from ms_compress.models.head import HEAD
from ms_compress.models.whole_model import WholeModel
from ms_compress.quantization.rounding import QuantizedWeight

OPSET = 21
IR = 10
CONTRIB = "com.microsoft"
MASK_BIAS = -1e9
"""Added to the attention scores of masked keys."""
ON_EITHER_SIDE = "attention_mask is 0 for padding, on the left or on the right"
ON_THE_LEFT = (
    "attention_mask is 0 for padding, on the left; sliding windows count padding, so a row that was"
    " padded on the right cannot be continued"
)
"""Values of the file's metadata `padding`."""
CONTRIB_OPERATORS = ("GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits")


def pack(value: QuantizedWeight) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Pack codes (N, K), offset by 8, into (N, G, group / 2) bytes, even codes in the low half."""
    unsigned = (value.codes + 8).to(torch.uint8)
    packed = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)  # (N, K / 2)
    return packed.view(*value.scales.shape, -1).numpy()


class Graph:
    """Graph of a decoder, built node by node.

    Args:
        onnx: the library.
        config: configuration of the decoder.
        model: tensors of the decoder.
        accuracy_level: accuracy_level of MatMulNBits.
    """

    def __init__(
        self, onnx: Any, config: DecoderConfig, model: WholeModel, accuracy_level: int
    ) -> None:
        self.onnx, self.config, self.model = onnx, config, model
        self.accuracy_level = accuracy_level
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.tensors: dict[str, QuantizedWeight | Tensor] = {}

    def build(self) -> Any:
        """Build the complete model."""
        # Reading is collective: all ranks read in this order.
        self.tensors = {name: self._read_tensor(name) for name in self.model.tensors}
        self._add_positions()
        hidden = self._embedding()
        for layer in range(self.config.layers):
            hidden = self._block(layer, hidden)
        hidden = self._norm(hidden, "model.norm")
        head = "model.embed_tokens" if self.model.is_tied else HEAD
        self._linear(hidden, head, out="logits")
        return self._to_model()

    def _read_tensor(self, name: str) -> QuantizedWeight | Tensor:
        value = self.model.read(name)
        assert value is not None
        return value if isinstance(value, QuantizedWeight) else value.float()

    def _node(
        self, op_type: str, inputs: list[str], out: str | list[str], **attributes: Any
    ) -> str:
        outs = [out] if isinstance(out, str) else out
        domain = CONTRIB if op_type in CONTRIB_OPERATORS else ""
        make = self.onnx.helper.make_node
        self.nodes.append(
            make(op_type, inputs, outs, name=f"{op_type}:{outs[0]}", domain=domain, **attributes)
        )
        return outs[0]

    def _constant(self, name: str, value: Any) -> str:
        array = value.contiguous().numpy() if isinstance(value, Tensor) else np.asarray(value)
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def _add_positions(self) -> None:
        """Add sequence lengths, token positions, the attention mask and the rotary tables.

        The keys of a row are stored in the order of its tokens, including padding; only the mask
        shows where padding is: on the left, on the right, or between a prompt and its continuation.
        """
        config, kinds = self.config, self.onnx.TensorProto
        self._constant("zero", np.array([0], dtype=np.int64))
        self._constant("one", np.array([1], dtype=np.int64))
        self._constant("end", np.array([2**62], dtype=np.int64))  # slice to the end
        self._constant("scalar", np.array([], dtype=np.int64))  # the shape of a scalar
        self._node("Shape", ["attention_mask"], "rows", start=0, end=1)
        self._node("Shape", ["attention_mask"], "total", start=1, end=2)
        self._node("Shape", ["input_ids"], "sequence", start=1, end=2)
        # GroupQueryAttention needs the total length as a scalar, and by row the length minus 1.
        self._node("Reshape", ["total", "scalar"], "mask_length")
        self._node("Cast", ["mask_length"], "total_sequence_length", to=kinds.INT32)
        self._node("Sub", ["total", "one"], "last")
        self._node("Expand", ["last", "rows"], "last_of_rows")
        self._node("Cast", ["last_of_rows"], "seqlens_k", to=kinds.INT32)
        # onnxruntime uses a prompt's indices as positions, so padding on the left counts as tokens,
        # which shifts the whole row equally; padding after a token does not count.
        self._node("Shape", ["attention_mask"], "mask_shape")
        self._node("Expand", ["one", "mask_shape"], "ones")
        self._node("CumSum", ["ones", "one"], "places")
        self._node("CumSum", ["attention_mask", "one"], "tokens_so_far")
        self._node("Equal", ["attention_mask", "zero"], "is_filled")
        self._node("Greater", ["tokens_so_far", "zero"], "is_after_a_token")
        self._node("And", ["is_filled", "is_after_a_token"], "is_skipped")
        self._node("Cast", ["is_skipped"], "skipped", to=kinds.INT64)
        self._node("CumSum", ["skipped", "one"], "skipped_so_far")
        self._node("Sub", ["places", "skipped_so_far"], "numbers")
        self._node("Sub", ["numbers", "one"], "all_positions")
        self._node("Neg", ["sequence"], "first")
        self._node("Slice", ["all_positions", "first", "end", "one"], "position_ids")
        # Bias on the scores of padding keys, expanded to (B, 1, S, P + S).
        self._constant("none", np.array(MASK_BIAS, dtype=np.float32))
        self._constant("nothing", np.array(0, dtype=np.float32))
        self._node("Where", ["is_filled", "none", "nothing"], "bias_of_keys")
        self._constant("bias_axes", np.array([1, 2], dtype=np.int64))
        self._node("Unsqueeze", ["bias_of_keys", "bias_axes"], "bias_of_row")
        self._node("Concat", ["rows", "one", "sequence", "total"], "bias_shape", axis=0)
        self._node("Expand", ["bias_of_row", "bias_shape"], "attention_bias")
        # Rotary tables of all positions, (positions, D / 2).
        half = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
        frequencies = 1.0 / config.theta**half
        if config.frequency_divisors is not None:
            frequencies = frequencies / torch.tensor(config.frequency_divisors)
        if config.linear_factor is not None:
            frequencies = frequencies / config.linear_factor
        angles = torch.arange(config.positions, dtype=torch.float32)[:, None] * frequencies
        self._constant("cos_cache", angles.cos())
        self._constant("sin_cache", angles.sin())

    def _embedding(self) -> str:
        """Look up rows by token; a weight shared with the head is stored once."""
        module = "model.embed_tokens"
        value = self.tensors[f"{module}.weight"]
        if isinstance(value, Tensor):
            self._constant(f"{module}.rows", value)
            return self._node("Gather", [f"{module}.rows", "input_ids"], "hidden")
        width = value.codes.shape[1] // value.scales.shape[1]
        codes = self._constant(f"{module}.rows", pack(value).reshape(len(value.codes), -1))
        scales = self._constant(f"{module}.scales", value.scales.float())
        inputs = [codes, "input_ids", scales]
        # Rows (axis 0) are gathered; groups are along the columns (axis 1).
        settings = {"bits": 4, "block_size": width, "gather_axis": 0, "quantize_axis": 1}
        return self._node("GatherBlockQuantized", inputs, "hidden", **settings)

    def _norm(self, x: str, module: str) -> str:
        weight = self._constant(f"{module}.weight", self.tensors[f"{module}.weight"])
        return self._node(
            "SimplifiedLayerNormalization",
            [x, weight],
            f"{module}.out",
            axis=-1,
            epsilon=self.config.eps,
            stash_type=1,
        )

    def _linear(self, x: str, module: str, out: str | None = None) -> str:
        value = self.tensors[f"{module}.weight"]
        out = out or f"{module}.out"
        bias = self.tensors.get(f"{module}.bias")
        product = out if bias is None else f"{module}.product"
        if isinstance(value, QuantizedWeight):
            rows, features = value.codes.shape
            group = features // value.scales.shape[1]
            codes, scales = self._codes(module, value)
            self._node(
                "MatMulNBits",
                [x, codes, scales],
                product,
                K=features,
                N=rows,
                bits=4,
                block_size=group,
                accuracy_level=self.accuracy_level,
            )
        else:
            weight = f"{module}.transposed"
            # Tied to the embedding: its rows are stored once and transposed at run time.
            if self._is_stored(f"{module}.rows"):
                self._node("Transpose", [f"{module}.rows"], weight, perm=[1, 0])
            else:
                self._constant(weight, value.t())
            self._node("MatMul", [x, weight], product)
        if isinstance(bias, Tensor):
            self._node("Add", [product, self._constant(f"{module}.bias", bias)], out)
        return out

    def _codes(self, module: str, value: QuantizedWeight) -> tuple[str, str]:
        """Add codes in the layout of MatMulNBits, (N, G, group / 2), and scales, stored once."""
        codes, scales = f"{module}.codes", f"{module}.scales"
        if not self._is_stored(f"{module}.rows"):
            self._constant(codes, pack(value))
            return codes, self._constant(scales, value.scales.float())
        shape = np.array([*value.scales.shape, -1], dtype=np.int64)
        self._node("Reshape", [f"{module}.rows", self._constant(f"{module}.shape", shape)], codes)
        return codes, scales

    def _is_stored(self, name: str) -> bool:
        return any(constant.name == name for constant in self.constants)

    def _block(self, layer: int, hidden: str) -> str:
        prefix = f"model.layers.{layer}"
        x = self._norm(hidden, f"{prefix}.input_layernorm")
        attention = self._attention(layer, x)
        hidden = self._node("Add", [hidden, attention], f"{prefix}.attended")
        x = self._norm(hidden, f"{prefix}.post_attention_layernorm")
        gate = self._linear(x, f"{prefix}.mlp.gate_proj")
        # SwiGLU: down(silu(gate) * up), where silu(x) = x * sigmoid(x).
        gate_sigmoid = self._node("Sigmoid", [gate], f"{prefix}.mlp.sigmoid")
        silu = self._node("Mul", [gate, gate_sigmoid], f"{prefix}.mlp.silu")
        up = self._linear(x, f"{prefix}.mlp.up_proj")
        inner = self._node("Mul", [silu, up], f"{prefix}.mlp.inner")
        down = self._linear(inner, f"{prefix}.mlp.down_proj")
        return self._node("Add", [hidden, down], f"{prefix}.out")

    def _attention(self, layer: int, x: str) -> str:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        q, k, v = (self._linear(x, f"{prefix}.{letter}_proj") for letter in "qkv")
        if f"{prefix}.q_norm.weight" in self.tensors:
            q = self._head_norm(q, f"{prefix}.q_norm", config.heads)
            k = self._head_norm(k, f"{prefix}.k_norm", config.key_heads)
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        lengths = ["seqlens_k", "total_sequence_length", "cos_cache", "sin_cache"]
        out = self._node(
            "GroupQueryAttention",
            [q, k, v, *past, *lengths, "position_ids", "attention_bias"],
            [f"{prefix}.heads", f"present.{layer}.key", f"present.{layer}.value"],
            num_heads=config.heads,
            kv_num_heads=config.key_heads,
            do_rotary=1,
            rotary_interleaved=0,
            local_window_size=config.windows[layer] or -1,  # -1: full attention
        )
        return self._linear(out, f"{prefix}.o_proj")

    def _head_norm(self, x: str, module: str, heads: int) -> str:
        shape = np.array([0, 0, heads, self.config.head_width], dtype=np.int64)  # 0 keeps a dim
        split = self._node("Reshape", [x, self._constant(f"{module}.split", shape)], f"{module}.in")
        normed = self._norm(split, module)
        flat = np.array([0, 0, heads * self.config.head_width], dtype=np.int64)
        joined = self._constant(f"{module}.join", flat)
        return self._node("Reshape", [normed, joined], f"{module}.flat")

    def _to_model(self) -> Any:
        helper, kinds, config = self.onnx.helper, self.onnx.TensorProto, self.config
        value = helper.make_tensor_value_info
        inputs = [
            value("input_ids", kinds.INT64, ["batch", "sequence"]),
            value("attention_mask", kinds.INT64, ["batch", "total"]),
        ]
        outputs = [value("logits", kinds.FLOAT, ["batch", "sequence", config.vocabulary])]
        for layer in range(config.layers):
            for part in ("key", "value"):
                for destination, name, length in (
                    (inputs, f"past_key_values.{layer}.{part}", "past"),
                    (outputs, f"present.{layer}.{part}", "total"),
                ):
                    shape = ["batch", config.key_heads, length, config.head_width]
                    destination.append(value(name, kinds.FLOAT, shape))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR, producer_name="ms-compress"
        )
        slides = any(window is not None for window in config.windows)
        helper.set_model_props(model, {"padding": ON_THE_LEFT if slides else ON_EITHER_SIDE})
        return model
