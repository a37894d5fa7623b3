"""The families of models, a file each; `ms_parallel.models.family` finds them."""
