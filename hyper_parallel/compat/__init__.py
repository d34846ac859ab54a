"""Import paths and call forms of programs written for another release of this library. See README.md."""
