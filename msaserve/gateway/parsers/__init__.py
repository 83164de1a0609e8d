"""What a model writes besides its answer, found in its text as it comes: reasoning and tool calls."""
