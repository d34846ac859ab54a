"""The platform contract, implemented by PyTorch."""
