"""Chats as text, by a tokenizer's own chat template."""
