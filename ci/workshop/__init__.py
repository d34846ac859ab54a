"""What only maintainers run: ``python ci/workshop COMMAND``. It imports the library, which never imports it."""
