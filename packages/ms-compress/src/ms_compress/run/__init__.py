"""Parts of a command's run: its dataset, model, training, export and output folder."""
