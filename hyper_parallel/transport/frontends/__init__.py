"""What takes the place of a framework's own communication functions on ranks of this library."""
