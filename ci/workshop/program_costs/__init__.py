"""What `verify program` costs on a script that people train, compared with the same script under torchrun."""
