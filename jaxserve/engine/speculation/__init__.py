"""Decides whether drafts are verified, and how many tokens of each."""
