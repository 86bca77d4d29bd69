"""Sources of requests: generated (`synthetic`, `conversations`), read (`files`), or replayed (`trace`)."""
