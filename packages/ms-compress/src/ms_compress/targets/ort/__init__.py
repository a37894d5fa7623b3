"""ONNX files, for onnxruntime."""
