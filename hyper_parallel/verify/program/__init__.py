"""Compares any distributed program with its single-device form: `verify program` and `verify_program`."""
