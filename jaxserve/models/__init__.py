"""Model families: one module of pure functions over parameter trees each, and the registry that finds them."""
