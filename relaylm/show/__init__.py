"""Text, tables, pictures and figures of samples and results."""
