"""Decoding rules and schedules together."""
