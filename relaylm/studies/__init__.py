"""Experiments made of everything below; used by the command line alone."""
