"""Quality and price: judge, likelihood, importance, pairs, comparisons, prices and the store of results."""
