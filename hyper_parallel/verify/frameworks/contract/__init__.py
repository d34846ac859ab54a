"""The interface that every framework implements for the harness, with records and changes of a case."""
