"""The paper's claims, measured again."""
