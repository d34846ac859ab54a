"""A user's file without samples."""
