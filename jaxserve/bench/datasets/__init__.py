"""Where requests come from: made up (`synthetic`, `conversations`), read (`files`), or replayed (`trace`)."""
