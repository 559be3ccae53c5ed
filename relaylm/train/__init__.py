"""Corpora, recipes, one readable training loop, families, light siblings."""
