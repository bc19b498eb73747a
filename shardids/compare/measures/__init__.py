"""The measures of each key scheme: speed, size, order, duplicates, and behaviour when servers fail."""
