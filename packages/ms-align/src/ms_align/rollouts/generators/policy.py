"""The policy's own engine draws the responses: in this process, or under its layout."""
