"""The grammars of custom tools, held within the calls of a model."""
