"""Images and audio in messages: reading, checking, decoding, and conversion to model inputs."""
