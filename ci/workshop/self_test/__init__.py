"""Tests the harness: injects every kind of failure and checks that it is reported."""
