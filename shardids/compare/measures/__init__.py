"""What is measured of each key scheme: speed, size, order, duplicates, and what it does when servers fail."""
