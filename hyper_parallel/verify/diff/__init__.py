"""Any two runs of programs compared: `verify diff`."""
