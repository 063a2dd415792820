"""Thin adapters to other libraries. Each module imports its library when it is imported itself, and none before."""
