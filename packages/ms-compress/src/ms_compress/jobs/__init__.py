"""The jobs of the commands, one module each: thin layers over public functions."""
