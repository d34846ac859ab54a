"""The miniatures on PyTorch: plain programs that do not import this library."""
