"""Methods that change a model in place: QAT preparation, GPTQ, pruning and student models."""
