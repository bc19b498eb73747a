"""Keys of tables that stay where they are: one table, or a function that issues IDs, at a time."""
