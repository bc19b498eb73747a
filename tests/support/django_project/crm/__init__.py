"""An application that was there before its models were sharded: its migrations begin with BigAutoField."""
