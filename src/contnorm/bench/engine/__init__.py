"""The engine: takes a plan, a model and a strategy, and goes through the stream once."""
