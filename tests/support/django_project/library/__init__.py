"""An application whose tables have been changed in every way that Django's migrations know."""
