"""Building blocks of models: pure functions of one rank's view, inside the step's `shard_map`.

`linear`, `embedding` and `runtime/sampling` are the only places that write collectives.
"""
