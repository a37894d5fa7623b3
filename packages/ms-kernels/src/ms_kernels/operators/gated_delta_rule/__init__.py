"""The gated delta rule: a recurrent state in place of keys and values."""
