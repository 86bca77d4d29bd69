"""Whether and how far drafts are verified."""
