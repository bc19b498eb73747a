"""Reports a comparison: a page with charts, tables, and advice whose figures come from the run."""
