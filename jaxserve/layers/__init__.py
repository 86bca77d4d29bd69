"""The building blocks of models: pure functions of one rank's shard, called inside the step's `shard_map`.

They do the exchanges between shards; `axes`, `exchange` and `vocabulary` have the collectives that others share.
"""
