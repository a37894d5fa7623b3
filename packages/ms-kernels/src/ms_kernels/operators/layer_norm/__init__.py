"""Layer normalization (Ba, Kiros and Hinton, 2016)."""
