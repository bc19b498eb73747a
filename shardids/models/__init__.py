"""What goes into an application's models: columns, the type of an ID, pages of rows."""
