"""The interface that every framework implements for the harness, and code and data types that frameworks share."""
