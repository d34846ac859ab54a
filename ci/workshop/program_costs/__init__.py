"""What `verify program` costs on a script that people train, beside the same script under torchrun."""
