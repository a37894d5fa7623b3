"""Training after compression: the loop, its checkpoint, distillation and the text it reads."""
