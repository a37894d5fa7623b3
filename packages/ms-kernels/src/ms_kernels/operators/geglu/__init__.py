"""The gate of a GEGLU feed-forward block (Shazeer, 2020), exact or with the tanh approximation."""
