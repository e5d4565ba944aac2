"""Which norm a layer is, conversion of a model's norms, and their description in plain JSON."""
