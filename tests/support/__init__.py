"""What tests of several folders share, a module for each thing that it gives."""
