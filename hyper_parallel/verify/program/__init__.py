"""Verification of any distributed program beside its single-device form: `verify program` and `verify_program`."""
