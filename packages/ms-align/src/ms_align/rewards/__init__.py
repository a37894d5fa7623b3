"""What says how good a response is, and the sandbox that judged code runs in."""
