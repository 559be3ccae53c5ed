"""HTTP: requests of many clients through one engine, and a page to look at them."""
