"""Training after compression: loop, checkpoint, distillation, and the text to train on."""
