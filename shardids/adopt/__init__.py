"""Takes an existing PostgreSQL database into a cluster: plan, run, switch."""
