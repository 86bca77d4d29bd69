"""Benchmarks: datasets, arrival times, the load client, and statistics over the requests it recorded.

Nothing here imports jax, the engine or the server, so that any OpenAI-compatible server can be measured.
"""
