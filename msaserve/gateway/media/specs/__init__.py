"""One module per model: `from_checkpoint(files)` returns its ModelSpec, or None for another model's checkpoint."""
