"""The verification engine: records, their store, measured bounds, comparison; NumPy in, a verdict out."""
