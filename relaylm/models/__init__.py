"""Denoisers, tokenizers and families, in memory and on disk."""
