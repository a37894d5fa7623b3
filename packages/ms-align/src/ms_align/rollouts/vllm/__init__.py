"""Client of vLLM servers: requests, weight updates, and supervision of a server of our own."""
