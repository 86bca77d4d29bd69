"""Measures servers from outside: datasets, arrivals, the load client, and what is made of its records.

Nothing here imports jax, and nothing of the engine or the server: what is measured may be anybody's.
"""
