"""Facts of a cluster: one reader of the catalog and the nodes for doctor, metrics and console."""
