"""The engine: trains a model with a strategy on the steps of a plan, and evaluates it after each task."""
