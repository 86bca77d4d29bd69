"""Turns the form that a client asks for into a grammar of llguidance, and checks grammars within limits."""
