"""Users and their items as an HTTP service, with the data model of FastAPI's full-stack template."""
