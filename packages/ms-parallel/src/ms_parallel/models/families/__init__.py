"""Model families, one module per family; `ms_parallel.models.family` discovers them."""
