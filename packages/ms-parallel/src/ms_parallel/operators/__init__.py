"""The operators that models are made of: the Protocol, and implementations in plain torch."""
