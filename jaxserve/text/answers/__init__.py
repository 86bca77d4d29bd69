"""Takes a model's answers apart, as they are written: reasoning, text for the reader, calls of tools."""
