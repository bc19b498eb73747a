"""Its history."""
