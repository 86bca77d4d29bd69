"""The building blocks of models: pure functions of one rank's shard, called inside the step's `shard_map`.

Collectives are used only in `linear`, `embedding` and `runtime/step/sampling`.
"""
