"""Integrations with other frameworks: one module for each, which imports the framework.

>>> from contnorm.integrations import extras  # or timm, lightning, transformers, hub, avalanche, mammoth, optuna
>>> sorted(extras.EXTRAS)
['avalanche', 'hub', 'lightning', 'mammoth', 'optuna', 'timm', 'transformers']

This package itself imports no framework. ``contnorm.integrations.timm`` and the like are imported by their names.
"""
