"""Puts this folder on the import path: every test can `from golden_data import golden`."""
