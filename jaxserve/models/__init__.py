"""Model families: one file each, pure functions over parameter trees, and the registry that finds them."""
