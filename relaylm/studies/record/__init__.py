"""Scripts that wrote what lies under results/."""
