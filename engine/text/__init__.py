"""Text on the caller's side of the engine: tokens, chat templates, streams and stop strings."""
