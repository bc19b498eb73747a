"""A comparison as people read it: a page with charts, tables, and advice whose figures come from the run."""
