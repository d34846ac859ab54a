"""What every framework gives the harness: its interface, records and changes of a case."""
