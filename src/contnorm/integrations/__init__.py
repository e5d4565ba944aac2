"""Integrations with other frameworks: one module for each, which imports the framework.

This package itself imports no framework: ``contnorm.integrations.timm`` and the like are imported by their names.
"""
