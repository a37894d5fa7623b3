"""Plain folders, which torch runs in float32."""
