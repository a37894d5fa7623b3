"""Methods that change a model in place: quantisation-aware preparation, GPTQ, pruning, students."""
