"""Settings of a run: one schema, defaults of streams and strategies, and differences between runs."""
