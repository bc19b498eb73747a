"""What an ID is: its layout, its text forms, and arrays of them. Pure: no database is known here."""
