"""Nightly reports: the values of every night in one file, and a page of the last one."""
