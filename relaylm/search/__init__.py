"""The best schedule in a budget."""
